"""More than one rank: the loader's own executor fills a slot for each, and each rank of an engine attaches its own."""

import json
from pathlib import Path

import pytest

from tests.sites import MODEL
from tests.vllm import vllm_process
from tests.vllm.checkpoints import make_checkpoint
from tests.vllm.site import ARGUMENTS, START_TIMEOUT_S, VllmSite

# Without a first run, which an eager engine leaves out on a CPU, vLLM's later stages have nowhere to receive into.
STAGED = ("--max-model-len", "256", "-cc.mode=1", "-cc.backend=eager")
LAYOUTS = [
    ("qwen3-moe", {"tensor": 2}, ARGUMENTS),
    # Its first and last stage share the embedding that is tied.
    ("llama", {"pipeline": 2}, STAGED),
]


def made(folder: Path, architecture: str) -> Path:
    return make_checkpoint(folder / "made", architecture=architecture)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "parallel", "arguments"), LAYOUTS)
def test_every_rank_of_an_engine_gets_what_it_would_load(
    tmp_path: Path, architecture: str, parallel: dict[str, int], arguments: tuple[str, ...]
) -> None:
    site = VllmSite(tmp_path / "site", made(tmp_path, architecture), parallel=parallel, arguments=arguments)
    with site.keeper(until_resident=False):
        site.wait_until_resident(ranks=2)
        slots = site.status()["shards"]
        said = vllm_process.run(
            *("-m", "appliance.vllm.parity", "--manifest", str(site.manifest), "--model", MODEL),
            timeout_s=START_TIMEOUT_S,
        )
    result = json.loads(said.splitlines()[-1])
    assert sorted(slot["rank"] for slot in slots) == [0, 1]
    assert len(result["stages"]) == 2
    assert (result["same_tokens"], result["same_logprobs"], result["differing"]) == (True, True, [])


@pytest.mark.timeout(600)
def test_every_dense_replica_attaches(tmp_path: Path) -> None:
    site = VllmSite(tmp_path / "site", made(tmp_path, "qwen3"), parallel={"data": 2})
    with site.keeper(until_resident=False):
        site.wait_until_resident(ranks=2)
        with site.engine() as engine:
            assert "weights: hit (loaded, 2 ranks)" in engine.wait_for_line("weights:")
            assert sorted(slot["rank"] for slot in site.status()["shards"]) == [0, 1]
            assert len(site.status()["leases"]) == 2
            assert engine.stop() == 0, engine.said
