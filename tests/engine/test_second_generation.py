"""A new checkpoint where there is no room for old and new weights: the engine ends first, and comes back with new."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from appliance.ports import free_port
from tests import gpu_process
from tests.gpu_site import GpuSite
from tests.sites import MODEL

UUID = "GPU-00000000-0000-0000-0000-0000000000a0"
TIMEOUT_S = 120.0


def test_without_room_for_both_the_engine_ends_and_comes_back_with_the_new_weights(
    tmp_path: Path, checkpoint: Path
) -> None:
    site = GpuSite(tmp_path, checkpoint, UUID, fake=True, engine={"port": free_port()})
    replace_checkpoint(site, site.environment | {gpu_process.CROWDED: "1"})


def replace_checkpoint(site: GpuSite, environment: dict[str, str]) -> None:
    """Have `appliance up` serve a checkpoint, and the one that replaces it where there is no room for both."""
    argv = [site.python, "-m", "appliance", "up", "--manifest", str(site.manifest)]
    with (site.folder / "said").open("w") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=said, env=environment)
    try:
        first = eventually(lambda: served(site), site.folder)
        site.zero("model.norm.weight")
        site.sign()
        second = eventually(lambda: (found := served(site)) and found != first and found, site.folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    text = (site.folder / "said").read_text()
    assert first != second
    assert "waiting for the end of engine@m" in text
    assert "ending, to come back with other weights: no room for the new weights beside the old" in text
    # It was not taken for a failure, and nothing was loaded while the old weights were there.
    assert "no room for the weights" not in text
    assert "the loader failed" not in text


def served(site: GpuSite) -> str:
    """Return the root digest that an engine has attached; empty while none has."""
    if not (site.folder / "runtime" / MODEL / "keeper.sock").exists():
        return ""
    try:
        status = site.status()
    except Exception:  # the keeper is being restarted
        return ""
    engines = [lease for lease in status["leases"] if lease["client"] == "engine@m" and "total" in lease["phases_s"]]
    return str(status["root_digest"]) if engines else ""


def eventually(find: Callable[[], object], folder: Path) -> str:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := find()):
        assert time.monotonic() < deadline, (folder / "said").read_text()
        time.sleep(0.05)
    return str(found)
