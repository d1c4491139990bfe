"""More than one rank: the loader's own executor fills a slot for each, and each rank of an engine attaches its own."""

import json
from pathlib import Path

import pytest

from tests.sites import MODEL
from tests.vllm import vllm_process
from tests.vllm.checkpoints import make_checkpoint
from tests.vllm.site import START_TIMEOUT_S, VllmSite

LAYOUTS = [
    ("qwen3-moe", {"tensor": 2}),
    # Its first and last stage share the embedding that is tied.
    ("llama", {"pipeline": 2}),
]


@pytest.mark.parametrize(("architecture", "parallel"), LAYOUTS)
def test_every_rank_of_an_engine_gets_what_it_would_load(
    tmp_path: Path, architecture: str, parallel: dict[str, int]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", architecture=architecture)
    site = VllmSite(tmp_path / "site", checkpoint, parallel=parallel)
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
