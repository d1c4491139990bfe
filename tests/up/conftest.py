"""A stage for each test, in a folder whose path is short enough for sockets."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.up.stage import Stage


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="up-") as name:
        yield Path(name)


@pytest.fixture
def stage(folder: Path) -> Stage:
    return Stage(folder)
