"""`python -m tests.vllm.sources FOLDER`, in vLLM's environment: what a source says and does, as a line of JSON.

No engine is started: configurations are vLLM's own, and a model is built of them.
"""

import contextlib
import dataclasses
import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import replace, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import appliance.vllm.source as source_module
from appliance.errors import ApplianceError
from appliance.keeper.settings import Slot
from appliance.ports import free_port
from appliance.vllm import model_loader
from appliance.vllm.assignment import LOADER_VARIABLE, MANIFEST_VARIABLE, MODEL_VARIABLE, OUTCOMES_VARIABLE
from appliance.vllm.loading import engine_config
from appliance.vllm.model_loader import SERVED, ApplianceModelLoader, Served, source_of
from appliance.vllm.outcome import read_all
from appliance.vllm.replicas import become_replica
from appliance.vllm.source import VllmSource
from tests.keeper.serving import Serving
from tests.keeper.shards import shard_of
from tests.sites import MODEL, Site
from tests.vllm.checkpoints import make_checkpoint
from tests.vllm.drafts import add_draft

ARGUMENTS = ["--max-model-len", "256", "--enforce-eager", "--load-format", "appliance"]


def unclaimed(folder: Path) -> dict[str, Any]:
    """Return what is left of a finished module that nobody serves."""
    checkpoint = make_checkpoint(folder / "mixture", architecture="qwen3-moe")
    config = engine_config([str(checkpoint), *ARGUMENTS])
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        source = VllmSource(config, config.model_config, prefix="", target=None)
        layers: Any = config.compilation_config.static_forward_context
        module = source.finish(source.skeleton({}), "processed")
        found = {"entered": sorted(layers), "layers": len(layers)}
        experts = weakref.ref(next(part for part in module.modules() if hasattr(part, "w13_weight")))
        source.claim(module)
        found |= {"claimed": len(layers)}
        layers.clear()
        del module
        gc.collect()
    return found | {"alive": experts() is not None}


def rank_of_a_small_draft(folder: Path) -> dict[str, Any]:
    """Return the ranks of the second replica's two models, each as vLLM's worker would have its loader asked for it."""
    checkpoint = make_checkpoint(folder / "target")
    draft = add_draft(folder / "draft", checkpoint, "draft_model")
    told = {"method": "draft_model", "num_speculative_tokens": 1, "model": draft["checkpoint"]}
    more = ["--speculative-config", json.dumps(told), "--data-parallel-size", "2"]
    config = engine_config([str(checkpoint), *ARGUMENTS, *more])
    become_replica(config, 1)
    target = source_of(config, config.model_config, prefix="", target=None)
    SERVED.append(Served(target, None, None))  # type: ignore[arg-type]
    speculative = config.speculative_config
    # As vLLM's proposer does it.
    parallel = replace(speculative.draft_parallel_config, rank=config.parallel_config.rank)
    of_draft = replace(config, quant_config=None, parallel_config=parallel, model_config=speculative.draft_model_config)
    source = source_of(of_draft, of_draft.model_config, prefix="draft_model", target=None)
    return {target.role: target.rank, source.role: source.rank}


class Processing(VllmSource):
    """A source that counts how often it was to post-process."""

    times = 0

    def _process(self, module: torch.nn.Module) -> None:
        self.times += 1


def processed(folder: Path) -> dict[str, int]:
    """Return how often weights as loaded are post-processed: by an engine, by a loader, by one of a mixture."""
    dense = engine_config([str(folder / "target"), *ARGUMENTS])
    mixture = engine_config([str(folder / "mixture"), *ARGUMENTS])
    found = {}
    for name, config, computes in (("engine", dense, True), ("loader", dense, False), ("mixture", mixture, False)):
        source = Processing(config, config.model_config, prefix="", target=None, computes=computes)
        source.finish(torch.nn.Linear(1, 1), "loaded")
        found[name] = source.times
    return found


def finished_later(folder: Path) -> dict[str, Any]:
    """Return what vLLM does to a module that is loaded, in its order, if it quantizes that on the way, and if not.

    A CPU cannot quantize so: that a module is one of those is told in place of it, and so is what finishes it.
    """
    site = Site(folder / "site", folder / "target", engine={"kind": "vllm", "port": 18000})
    config = engine_config([str(site.checkpoint), *ARGUMENTS])
    read = DefaultModelLoader.load_weights
    found = {}
    for quantizes in (True, False):
        done: list[tuple[str, Any]] = []

        def read_all(loader: Any, module: Any, model_config: Any, done: list[Any] = done) -> None:
            read(loader, module, model_config)
            done.append(("read", module))

        def finish(module: Any, model_config: Any, done: list[Any] = done) -> None:
            done.append(("finished", module))

        with (
            set_current_vllm_config(config),
            patch.object(source_module, "quantizes_while_loading", lambda *told, answer=quantizes: answer),
            patch.object(DefaultModelLoader, "load_weights", read_all),
            patch.object(source_module, "finalize_layerwise_processing", finish),
        ):
            loaded = VllmSource(config, config.model_config, prefix="", target=site.target()).load("loaded", print)
        found[str(quantizes)] = [what for what, module in done if module is loaded.module]
    return found


def refusal_before_loading(folder: Path) -> dict[str, Any]:
    """Return what the starting process is told where vLLM asks for the weights' size, and there is no keeper.

    And what is said on the way.
    """
    said: list[str] = []
    outcomes = folder / "outcomes"
    outcomes.mkdir()
    more = ["--model-loader-extra-config", json.dumps({"socket": str(folder / "none.sock"), "wait": 0})]
    config = engine_config([str(folder / "target"), *ARGUMENTS, *more])
    os.environ[OUTCOMES_VARIABLE] = str(outcomes)
    with (
        contextlib.suppress(ApplianceError),
        patch.object(model_loader, "event", lambda text, **more: said.append(text)),
    ):
        ApplianceModelLoader(config.load_config).get_external_weight_memory(config)
    return {"outcomes": [dataclasses.asdict(outcome) for outcome in read_all(outcomes)], "said": said}


def external_memory(folder: Path) -> dict[str, Any]:
    """Return what an engine and a loader are told of weights that lie on their device already, and what lies there."""
    socket_folder = folder / "external"
    socket_folder.mkdir()
    slots = [Slot("target", 0, "cpu"), Slot("draft", 0, "cpu"), Slot("target", 1, "GPU-elsewhere")]
    with Serving(socket_folder, layout=slots) as serving:
        own = [serving.put(shard_of(role="target")), serving.put(shard_of(role="draft", slabs=3))]
        serving.put(shard_of(rank=1, device="GPU-elsewhere"))
        more = ["--model-loader-extra-config", json.dumps({"socket": str(serving.path), "wait": 0})]
        config = engine_config([str(folder / "target"), *ARGUMENTS, *more])
        asked = ApplianceModelLoader(config.load_config).get_external_weight_memory(config)
        site = Site(folder / "loads", folder / "target", engine={"kind": "vllm", "port": 18000})
        loader = {MANIFEST_VARIABLE: str(site.manifest), MODEL_VARIABLE: MODEL, LOADER_VARIABLE: "1"}
        config.load_config.model_loader_extra_config = {}
        with patch.dict(os.environ, loader):
            loads = ApplianceModelLoader(config.load_config).get_external_weight_memory(config)
        return {"there": sum(shard.record.size_bytes for shard in own), "engine": asked, "loader": loads}


def facts_before_and_after(folder: Path) -> list[dict[str, str]]:
    """Return a source's facts, and those after something has changed the configuration that it was made of."""
    config = engine_config([str(folder / "target"), *ARGUMENTS])
    source = VllmSource(config, config.model_config, prefix="", target=None)
    found = [{name: str(value) for name, value in source.facts({}).items()}]
    config.model_config.max_model_len = 1
    config.model_config.hf_config.rope_theta = 1.0
    return [*found, {name: str(value) for name, value in source.facts({}).items()}]


if __name__ == "__main__":
    # vLLM logs to standard output.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found = {
        "unclaimed": unclaimed(folder),
        "ranks": rank_of_a_small_draft(folder),
        "processed": processed(folder),
        "finished later": finished_later(folder),
        "refusals": refusal_before_loading(folder),
        "external": external_memory(folder),
        "facts": facts_before_and_after(folder),
    }
    print(json.dumps(found), file=results, flush=True)
    os._exit(0)
