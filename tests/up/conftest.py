"""A stage and a troupe for each test, in a folder whose path is short enough for sockets."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.up.stage import Stage
from tests.up.troupe import Play


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="up-") as name:
        yield Path(name)


@pytest.fixture
def stage(folder: Path) -> Stage:
    return Stage(folder)


@pytest.fixture
def play(folder: Path) -> Play:
    return Play(folder)


@pytest.fixture(autouse=True)
def signals_count() -> Iterator[None]:
    """Tests that run in the background of a shell have Ctrl-C ignored, and a supervisor respects that."""
    numbers = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
