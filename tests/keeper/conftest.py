"""A folder that another user can reach: pytest's own are closed to everyone else."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="appliance-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
