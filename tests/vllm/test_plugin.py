"""What vLLM's processes do when they load the plugin, with a real vLLM."""

import subprocess
from pathlib import Path

import pytest

from appliance.vllm.assignment import LOADER_VARIABLE
from tests.orphans import TIMEOUT_S, outlives
from tests.vllm import vllm_process

# A worker, as vLLM starts one: it loads plugins, and waits for who started it.
WORKER = """
import multiprocessing, os, time

def worker():
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=worker)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(("loads", "ends"), [("1", True), ("", False)], ids=["a loader's", "an engine's"])
def test_the_worker_of_a_loader_does_not_outlive_it(tmp_path: Path, loads: str, ends: bool) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with vllm_process.start(str(script), environ={LOADER_VARIABLE: loads}, stdout=subprocess.PIPE) as loader:
        # What becomes of an engine's is vLLM's own affair.
        assert outlives(loader, timeout_s=TIMEOUT_S if ends else 0.5) is not ends
