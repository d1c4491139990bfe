"""vLLM under a real systemd: the same engine@MODEL, attached to the keeper, in the same sandbox."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.checkpoints import Checkpoints
from tests.host.images import OURS, VLLM_BASE, VLLM_IMAGE, VLLM_VOLUME, added, build_vllm_image
from tests.host.installed import OTHER_PORT, VLLM_PLACE, Host
from tests.host.served import BASE, is_back
from tests.host.stream import ask
from tests.vllm.vllm_process import SETTINGS, vllm_python

NAME = "v"
WEIGHTS, ENGINE = f"weights@{NAME}.service", f"engine@{NAME}.service"
# Three processes of vLLM are imported one after the other, on however few cores.
START_TIMEOUT_S = 600.0
MODELS: dict[str, Any] = {
    NAME: {
        "checkpoint": f"/srv/models/{NAME}",
        "wait": START_TIMEOUT_S,
        "engine": {
            "kind": "vllm",
            "port": OTHER_PORT,
            "args": ["--max-model-len", "256", "--enforce-eager"],
            "environment": {name: value for name, value in SETTINGS.items() if name != "OMP_NUM_THREADS"},
            "threads": 1,
        },
    }
}
CONTAINED = {NAME: MODELS[NAME] | {"engine": MODELS[NAME]["engine"] | {"runtime": "podman", "image": VLLM_IMAGE}}}
# What `APPLIANCE_EXTRAS=vllm ./install.sh` would have installed into the appliance's own environment.
DROP_IN = f"[Service]\nEnvironment=PYTHONPATH={VLLM_PLACE}\n"

QUADLET_DROP_INS = f"/etc/containers/systemd/engine@{NAME}.container.d"

# One release will do: nothing of vLLM depends on systemd's. The other one has no Podman.
pytestmark = [
    pytest.mark.host,
    pytest.mark.model,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("kind", ["trixie"], indirect=True, scope="session"),
]


@pytest.fixture(scope="module")
def vllm(installed: Host, checkpoints: Checkpoints, model_checkpoint: Path) -> Iterator[Host]:
    """A host whose one model, the real one, is served by vLLM; it has its own model again afterwards."""
    vllm_python()
    installed.put_checkpoint(model_checkpoint, NAME)
    for unit in (WEIGHTS, ENGINE):
        installed.machine.write(f"/etc/systemd/system/{unit}.d/50-vllm.conf", DROP_IN)
    installed.put_manifest(MODELS)
    installed.appliance("apply", timeout_s=START_TIMEOUT_S)
    installed.machine.wait_for(
        lambda: installed.state(ENGINE) == "active", what="vLLM serves", timeout_s=START_TIMEOUT_S
    )
    yield installed
    installed.put_checkpoint(checkpoints.first)
    installed.put_manifest(BASE)
    installed.apply()
    for unit in (WEIGHTS, ENGINE):
        installed.machine.run(["rm", "-r", f"/etc/systemd/system/{unit}.d"])
    installed.machine.run(["rm", "-rf", QUADLET_DROP_INS])


def test_a_restart_attaches_and_answers_as_before_whatever_became_of_the_keeper(vllm: Host) -> None:
    shards, answer, keeper = vllm.shard_ids(NAME), ask(OTHER_PORT, NAME), vllm.pid(WEIGHTS)
    assert answer
    vllm.machine.systemctl("kill", "--signal=SIGKILL", "--kill-whom=main", WEIGHTS)
    is_back(vllm, WEIGHTS, keeper)
    assert ask(OTHER_PORT, NAME) == answer, "the engine goes on without its keeper"
    # Drains, restarts, waits, and ends with 0 only for a hit whose canary says what was recorded.
    said = vllm.appliance("restart", NAME, timeout_s=START_TIMEOUT_S).stdout
    assert "hit" in said and "tokens as recorded" in said
    assert ask(OTHER_PORT, NAME) == answer
    assert vllm.shard_ids(NAME) == shards, "nothing was loaded again"
    assert "VERDICT=hit" in vllm.machine.run(["journalctl", "--output=export", f"--unit={ENGINE}"]).stdout


def test_in_a_container_it_attaches_to_the_same_weights_and_answers_the_same(vllm: Host) -> None:
    shards, answer = vllm.shard_ids(NAME), ask(OTHER_PORT, NAME)
    build_vllm_image(vllm)
    paths, size_bytes = added(vllm, VLLM_IMAGE, VLLM_BASE)
    assert paths and not [path for path in paths if not OURS.search(path)] and size_bytes < 5_000_000
    vllm.machine.write(f"{QUADLET_DROP_INS}/50-vllm.conf", f"[Container]\nVolume={VLLM_VOLUME}\n")
    vllm.put_manifest(CONTAINED)
    vllm.appliance("apply", timeout_s=START_TIMEOUT_S)
    first = _attached(vllm, shards)
    assert ask(OTHER_PORT, NAME) == answer
    vllm.machine.systemctl("restart", ENGINE, timeout_s=START_TIMEOUT_S)
    assert _attached(vllm, shards) != first
    assert ask(OTHER_PORT, NAME) == answer


def test_stopping_its_weights_stops_the_engine_and_frees_them(vllm: Host) -> None:
    vllm.machine.systemctl("stop", WEIGHTS, timeout_s=START_TIMEOUT_S)
    assert vllm.state(ENGINE) == "inactive"
    assert vllm.held_bytes() == 0
    assert vllm.machine.run(["podman", "ps", "--all", "--quiet"]).stdout == ""


def _attached(host: Host, shards: list[str]) -> str:
    """Return the container that serves, which has attached to these shards."""
    [lease] = host.status(NAME)["leases"]
    assert lease["verdict"] == "hit" and host.shard_ids(NAME) == shards
    found = ["podman", "ps", "--quiet", f"--filter=name=^engine-{NAME}$", f"--filter=ancestor={VLLM_IMAGE}"]
    [container] = host.machine.run(found).stdout.split()
    return container
