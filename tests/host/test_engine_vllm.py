"""vLLM under a real systemd: the same engine@MODEL, attached to the keeper, in the same sandbox."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.host.checkpoints import Checkpoints
from tests.host.installed import OTHER_PORT, VLLM_PLACE, Host
from tests.host.served import BASE, is_back
from tests.host.stream import ask
from tests.vllm.checkpoints import make_checkpoint
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
# What `APPLIANCE_EXTRAS=vllm ./install.sh` would have installed into the appliance's own environment.
DROP_IN = f"[Service]\nEnvironment=PYTHONPATH={VLLM_PLACE}\n"

# One release will do: nothing of vLLM depends on systemd's.
pytestmark = [
    pytest.mark.host,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("kind", ["trixie"], indirect=True, scope="session"),
]


@pytest.fixture(scope="module")
def vllm(installed: Host, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host whose one model is served by vLLM; it has its own model again afterwards."""
    vllm_python()
    installed.put_checkpoint(
        make_checkpoint(tmp_path_factory.mktemp("vllm") / "checkpoint", architecture="qwen3"), NAME
    )
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


def test_stopping_its_weights_stops_the_engine_and_frees_them(vllm: Host) -> None:
    vllm.machine.systemctl("stop", WEIGHTS, timeout_s=START_TIMEOUT_S)
    assert vllm.state(ENGINE) == "inactive"
    assert vllm.held_bytes() == 0
