"""install.sh on a host that serves: an upgrade, and then the end of it. By its name the last file of this folder."""

import json
from collections.abc import Callable
from functools import partial

import pytest

from tests.host import installed as installing
from tests.host.checkpoints import Checkpoints
from tests.host.images import build_image
from tests.host.installed import MANIFEST, MODEL, PORT, Host
from tests.host.root import Kind
from tests.host.served import ENGINE, WEIGHTS, answers, health, is_back
from tests.host.stream import Stream

IMAGE = "localhost/packed:1"

pytestmark = [pytest.mark.host, pytest.mark.timeout(1800)]


@pytest.fixture
def upgrade(host: Host, kind: Kind) -> Callable[[], object]:
    """Return what installs a release over the one that is there: with no network, from a bundle, where Podman is.

    That bundle has few packages, as the release before has the rest, and a small image, which the host lacks again.
    """
    if kind != "trixie":
        return partial(installing.install, host.machine)
    host.machine.run(["sh", "-c", "tar --create --directory=/etc hostname | podman import --quiet - localhost/small"])
    build_image(host, IMAGE, "FROM localhost/small", "LABEL made=here", 'HEALTHCHECK CMD ["true"]')
    installing.install(host.machine, "--bundle", "/root/bundle.tar", IMAGE, extras="cuda")
    host.machine.run(["podman", "rmi", IMAGE, "localhost/small"])
    host.machine.run(["tar", "--extract", "--file=/root/bundle.tar", "--directory=/root"])

    def from_bundle() -> None:
        installing.install(host.machine, place="/root/appliance", network=False)
        [found] = json.loads(host.machine.run(["podman", "image", "inspect", IMAGE]).stdout)
        assert found["Labels"]["made"] == "here" and found["Healthcheck"]["Test"] == ["CMD", "true"]

    return from_bundle


def test_an_upgrade_keeps_weights_engines_and_the_manifest(
    host: Host, checkpoints: Checkpoints, upgrade: Callable[[], object]
) -> None:
    host.machine.run(["sh", "-c", f"echo '# edited' >>{MANIFEST}"])
    shards, keeper, engine = host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE)
    with Stream(PORT, MODEL) as stream:
        upgrade()
        is_back(host, WEIGHTS, keeper)
        answers(host, stream, checkpoints.answers[checkpoints.first])
    assert (host.shard_ids(), host.pid(ENGINE)) == (shards, engine)
    assert set(stream.outcomes) == {"answered"}
    assert host.machine.run(["tail", "-n1", MANIFEST]).stdout == "# edited\n"
    host.machine.systemctl("restart", ENGINE, timeout_s=120)
    assert health()["verdict"] == "hit" and host.shard_ids() == shards


def test_uninstalling_leaves_the_operators_files(host: Host) -> None:
    said = installing.install(host.machine, "--uninstall")
    assert "/etc/appliance" in said and host.held_bytes() == 0
    left = [MANIFEST, "/etc/appliance/trust/signer.pub", f"/srv/models/{MODEL}/model.sig"]
    host.machine.run(["ls", *left])
    gone = ["/opt/appliance", "/usr/local/bin/appliance", "/usr/local/lib/systemd/system/weights@.service"]
    assert host.machine.run(["ls", *gone], check=False).stdout == ""
    listed = host.machine.systemctl(
        "list-unit-files", "--no-legend", "weights@*", "engine*@*", "checkpoint@*", check=False
    )
    assert listed == ""
