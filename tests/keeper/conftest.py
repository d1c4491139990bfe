"""What tests of a keeper share: a service manager, a keeper to talk to, and a folder that other users can reach."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.keeper import loading
from tests.keeper.serving import Serving
from tests.keeper.shards import shard_of
from tests.keeper.stage import Stage
from tests.service_manager import ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as manager:
        yield manager


@pytest.fixture
def serving(tmp_path: Path, manager: ServiceManager) -> Iterator[Serving]:
    """Serve one slot, which is empty."""
    with Serving(tmp_path, environ=manager.environ) as serving:
        yield serving


@pytest.fixture
def resident(serving: Serving) -> Serving:
    """Serve one slot, which is filled."""
    serving.put(shard_of())
    return serving


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Give a keeper of two slots in this process, and its children."""
    stage = Stage(tmp_path)
    monkeypatch.setattr(sys, "executable", str(stage.program))
    monkeypatch.setattr(loading, "FIRST_RETRY_S", 0.01)
    return stage


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that another user can reach: pytest's own are closed to everyone else."""
    with tempfile.TemporaryDirectory(prefix="appliance-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
