"""What every test of tensors gets: modules that are gone when the test is."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_module_is_left() -> Iterator[None]:
    """A module in a cycle keeps its slabs mapped until the collector runs, which need not look at all of torch."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
