"""One installed host of each kind for all files of this folder: installing takes a minute. The last one uninstalls."""

from collections.abc import Iterator

import pytest

from tests.host import installed as installing
from tests.host.checkpoints import Checkpoints
from tests.host.installed import Host
from tests.host.root import RELEASES, Kind
from tests.host.served import BASE, ENGINE, WEIGHTS, serves


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session", params=RELEASES)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(scope="session")
def installed(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with installing.installed(kind, tmp_path_factory.mktemp("keys")) as host:
        yield host


@pytest.fixture
def host(installed: Host, checkpoints: Checkpoints) -> Host:
    """A host that serves the first checkpoint, whatever the test before it has done."""
    if not serves(installed, checkpoints):
        installed.machine.systemctl("stop", "weights@*", "engine@*", "checkpoint@*", check=False)
        installed.put_checkpoint(checkpoints.first)
        installed.put_manifest(BASE)
        installed.apply()
        installed.machine.systemctl("reset-failed", check=False)
        installed.machine.systemctl("start", "appliance.target", WEIGHTS, ENGINE, timeout_s=120)
        assert serves(installed, checkpoints)
    return installed
