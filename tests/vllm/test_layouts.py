"""More than one rank: the loader's own executor fills a slot for each, and each rank of an engine attaches its own."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.keeper.settings import Slot
from appliance.target import slots
from tests.keeper.serving import Serving
from tests.service_manager import ServiceManager
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
    ("qwen3", {"data": 2}, ARGUMENTS),
]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as manager:
        yield manager


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
        shards = site.status()["shards"]
        said = vllm_process.run(
            *("-m", "appliance.vllm.parity", "--manifest", str(site.manifest), "--model", MODEL),
            timeout_s=START_TIMEOUT_S,
        )
    result = json.loads(said.splitlines()[-1])
    assert sorted(shard["rank"] for shard in shards) == [0, 1]
    assert result["stages"].keys() == {"target 0", "target 1"}
    assert (result["same_tokens"], result["same_logprobs"], result["differing"]) == (True, True, [])


@pytest.mark.timeout(600)
def test_every_dense_replica_attaches_and_all_end_once_their_answers_are_out(
    tmp_path: Path, manager: ServiceManager
) -> None:
    site = VllmSite(tmp_path / "site", made(tmp_path, "qwen3"), parallel={"data": 2})
    with site.kept(manager) as keeper:
        site.wait_until_resident(ranks=2)
        with site.engine() as engine:
            assert "weights: hit (loaded, 2 ranks)" in engine.wait_for_line("weights:")
            assert sorted(slot["rank"] for slot in site.status()["shards"]) == [0, 1]
            assert len(site.status()["leases"]) == 2
            running = engine.processes()
            keeper.kill()
            # The next one has new weights to hold, and no room for them beside these.
            with successor(site, manager) as serving:
                serving.wait_until(lambda: len(serving.holdings.leases) == 2)
                answer = streamed(site)
                next(answer)
                for lease in list(serving.holdings.leases):
                    serving.call(partial(lease.ask_to_leave, "no room"))
                *_, last = answer
                assert last.choices[0].finish_reason == "length", "what was asked before is answered"
                assert engine.ended()[0] == 0, engine.said
                serving.wait_until(lambda: not serving.holdings.leases)
            wait_for_end(running)


def wait_for_end(processes: list[int]) -> None:
    """Return once all of them are gone: Python's own helpers end a moment after what they help."""
    assert processes
    deadline = time.monotonic() + START_TIMEOUT_S
    while left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


@contextmanager
def successor(site: VllmSite, manager: ServiceManager) -> Iterator[Serving]:
    """Serve in this process what the service manager has of a keeper that is gone."""
    target = site.target()
    layout = [Slot(**slot) for slot in slots(target.model)]
    with Serving(target.socket_path.parent, environ=manager.environ, layout=layout, target=target.fingerprint) as own:
        for shard in own.custody.adopt(manager.handed_over()).shards:
            own.put(shard)
        yield own


def streamed(site: VllmSite) -> Iterator[Any]:
    """Yield the parts of a long answer as they come."""
    base = f"http://127.0.0.1:{site.port}/v1"
    with openai.OpenAI(base_url=base, api_key="-", max_retries=0, timeout=120) as client:
        yield from client.completions.create(
            model=MODEL, prompt="One", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
