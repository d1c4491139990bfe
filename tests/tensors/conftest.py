"""Shards that are closed, and modules that are gone, when the test is."""

import gc
from collections.abc import Iterator

import pytest
from torch import nn

from tests.tensors.shards import MakeShard, Shard


@pytest.fixture(autouse=True)
def no_module_is_left() -> Iterator[None]:
    """A module in a cycle keeps its slabs mapped until the collector runs, which need not look at all of torch."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture
def shard() -> Iterator[MakeShard]:
    shards: list[Shard] = []

    def make(module: nn.Module) -> Shard:
        shards.append(Shard(module))
        return shards[-1]

    yield make
    for made in shards:
        made.close()
