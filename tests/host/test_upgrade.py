"""install.sh on a host that serves: an upgrade, and then the end of it. By its name the last file of this folder."""

import pytest

from tests.host import installed as installing
from tests.host.checkpoints import Checkpoints
from tests.host.installed import MANIFEST, MODEL, PORT, Host
from tests.host.served import ENGINE, WEIGHTS, answers, health, is_back
from tests.host.stream import Stream

pytestmark = [pytest.mark.host, pytest.mark.timeout(1800)]


def test_an_upgrade_keeps_weights_engines_and_the_manifest(host: Host, checkpoints: Checkpoints) -> None:
    host.machine.run(["sh", "-c", f"echo '# edited' >>{MANIFEST}"])
    shards, keeper, engine = host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE)
    with Stream(PORT, MODEL) as stream:
        installing.install(host.machine)
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
