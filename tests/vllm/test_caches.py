"""An engine that restarts compiles nothing: all that it would is in the cache folder of its target."""

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest
import torch

from appliance.fingerprint import Fingerprint
from appliance.keeper.settings import Slot
from appliance.target import slots
from tests.engine.checkpoints import write_checkpoint
from tests.keeper.serving import Serving
from tests.service_manager import ServiceManager
from tests.sites import MODEL
from tests.tiers import cannot_run
from tests.vllm import vllm_process
from tests.vllm.checkpoints import SMALL
from tests.vllm.site import VllmSite

# As it is on a CPU without --enforce-eager: the whole model is one graph.
ARGUMENTS = ("--max-model-len", "64")
ENVIRONMENT = {
    # What vLLM 0.32 itself keeps of a compiled model it cannot load on a CPU ('function' object has no attribute
    # 'finalize_loading'), and makes anew at each start. Without that it has torch's caches, as a GPU has below it.
    "VLLM_USE_AOT_COMPILE": "0",
    # Says of each graph whether it was found there.
    "TORCH_LOGS": "torch._functorch._aot_autograd.autograd_cache",
    **{name: value for name, value in vllm_process.ENGINE_SETTINGS.items() if name != "VLLM_CACHE_ROOT"},
}


@pytest.fixture
def site(tmp_path: Path) -> VllmSite:
    if which("g++") is None:
        cannot_run("g++ is not installed, which torch compiles with")
    made = write_checkpoint(tmp_path / "made", "qwen3", SMALL | {"num_hidden_layers": 1}, dtype=torch.bfloat16)
    site = VllmSite(tmp_path / "site", made, arguments=ARGUMENTS, on_miss="load")
    site.write(engine={**site.settings["engine"], "environment": ENVIRONMENT})
    return site


@pytest.fixture
def keeper(site: VllmSite, tmp_path: Path) -> Iterator[Serving]:
    """An empty one: the first engine donates."""
    target = site.target()
    folder = target.socket_path.parent
    folder.mkdir(parents=True)
    layout = [Slot(**slot) for slot in slots(target.model)]
    with (
        ServiceManager(tmp_path) as manager,
        Serving(folder, environ=manager.environ, layout=layout, target=wanted(site)) as serving,
    ):
        yield serving


def wanted(site: VllmSite) -> Fingerprint:
    """Return the target's facts as they are where vLLM is: its version is one of them."""
    read = "import json, sys; from pathlib import Path; from appliance.target import read_target; "
    read += "print(json.dumps(read_target(Path(sys.argv[1]), sys.argv[2]).fingerprint.to_json()))"
    said = vllm_process.run("-c", read, str(site.manifest), MODEL, timeout_s=60.0)
    return Fingerprint.from_json(json.loads(said))


def served(site: VllmSite) -> tuple[str, list[str]]:
    """Start an engine and stop it; return what it said of its weights, and whether it found the graph: hit or miss."""
    with site.engine() as engine:
        weights = engine.wait_for_line("verdict=")
        engine.process.terminate()
        status, said = engine.ended()
    assert status == 0, engine.said
    return weights, re.findall("AOTAutograd cache (hit|miss)", said)


def kept(site: VllmSite) -> dict[str, tuple[int, int, int]]:
    """Return every file below the cache directory, with what changes when it is written again."""
    cache = site.folder / "cache" / MODEL
    found = {str(path.relative_to(cache)): path.stat() for path in cache.rglob("*")}
    return {
        name: (one.st_ino, one.st_size, one.st_mtime_ns) for name, one in found.items() if stat.S_ISREG(one.st_mode)
    }


@pytest.mark.timeout(600)
def test_an_engine_that_restarts_compiles_nothing(site: VllmSite, keeper: Serving) -> None:
    weights, graphs = served(site)
    assert "weights: donated" in weights
    assert graphs == ["miss"]
    compiled = kept(site)
    # Code that torch wrote, and what the compiler made of it.
    assert {".cpp", ".so", ".py"} <= {Path(name).suffix for name in compiled}
    weights, graphs = served(site)
    assert "weights: hit" in weights
    assert graphs == ["hit"]
    # No file is there for one process alone.
    assert kept(site) == compiled
