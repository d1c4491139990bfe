"""`python -m tests.vllm.failures FOLDER`, in vLLM's environment: how processes of ours end where vLLM fails, as JSON.

No engine is started: what would start one fails in its place.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.v1.worker.gpu_worker import Worker

from appliance.errors import ApplianceError, MissError
from appliance.verdict import Outcome as VerdictOutcome
from appliance.verdict import Verdict
from appliance.vllm import command_line, comparison, loading, model_loader, parity
from appliance.vllm.assignment import OUTCOMES_VARIABLE
from appliance.vllm.loading import engine_config
from appliance.vllm.outcome import Outcome, read_all, write
from appliance.vllm.source import VllmSource
from appliance.vllm.writers import WRITERS
from tests.keeper.shards import TARGET, record_of
from tests.sites import MODEL, Site
from tests.vllm.checkpoints import make_checkpoint

ARGUMENTS = ["--max-model-len", "256", "--enforce-eager"]
# So that no keeper is asked how a GPU's memory is to be divided.
CACHE = ["--kv-cache-memory-bytes", "1000000"]


def refuse_memory(*arguments: Any, **options: Any) -> Any:
    """Do as a CPU does that has too little memory."""
    return torch.empty(1 << 60, dtype=torch.uint8)


def fill_gpu(*arguments: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail_in_a_worker(*arguments: Any, **options: Any) -> Any:
    """Do as vLLM where one of its processes found nothing to attach."""
    write(os.environ[OUTCOMES_VARIABLE], Outcome("target", 1).failed(MissError("nothing is resident")))
    raise RuntimeError("WorkerProc initialization failed due to an exception in a background process.")


def fail(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("a bug")


def parity_ended(site: Site, *served: Callable[..., Any]) -> Any:
    """Return the exit status of a comparison whose engines, one after the other, end like this; or what it raised."""
    ends = iter(served)

    def end(*arguments: Any) -> Any:
        return next(ends)(*arguments)

    argv = ["parity", "--manifest", str(site.manifest), "--model", MODEL]
    with (
        patch.object(parity, "served", end),
        patch.object(parity, "end_with_parent"),
        patch.object(sys, "argv", argv),
        patch.dict(os.environ),
    ):
        try:
            return parity.main()
        except Exception as error:
            return repr(error)


def told(folder: Path, act: Callable[[], object]) -> dict[str, Any]:
    """Return the error with which this ends, and what it tells the process that started vLLM."""
    folder.mkdir()
    with patch.dict(os.environ, {OUTCOMES_VARIABLE: str(folder)}):
        try:
            act()
        except ApplianceError as error:
            (outcome,) = read_all(folder)
            return {"raised": error.exit_status, **dataclasses.asdict(outcome)}
    raise AssertionError("it ended well")


def attach_without_memory(site: Site, config: Any) -> None:
    socket = {"socket": str(site.folder / "none.sock"), "wait": 0}
    load_config = dataclasses.replace(config.load_config, model_loader_extra_config=socket)
    with patch.object(model_loader, "obtain", fill_gpu):
        model_loader.ApplianceModelLoader(load_config).load_model(config, config.model_config)


def said_of_donation(config: Any, *free_bytes: int) -> str:
    """Return what a worker says that has donated its weights, with so much of its GPU free before and after."""
    free = iter(free_bytes)
    record = record_of(TARGET)
    weights = SimpleNamespace(
        module=torch.nn.Module(), verdict=Verdict(VerdictOutcome.DONATED), record=record, client=None, phases_s={}
    )
    lines: list[str] = []
    with (
        patch.object(model_loader, "obtain", lambda *arguments, **options: weights),
        patch.object(model_loader, "_free_bytes", lambda config: next(free)),
        patch.object(model_loader, "event", lambda text, **fields: lines.append(text)),
        patch.object(VllmSource, "claim"),
        patch.object(model_loader, "SERVED", []),
    ):
        load_config = dataclasses.replace(config.load_config, model_loader_extra_config={"socket": "/none.sock"})
        model_loader.ApplianceModelLoader(load_config).load_model(config, config.model_config)
    return " ".join(lines)


def compare_without_memory(config: Any) -> None:
    worker = comparison.Comparison()
    worker.vllm_config = config
    served = SimpleNamespace(source=SimpleNamespace(role="target", rank=3), terms=None)
    with patch.object(model_loader, "SERVED", [served]), patch.object(comparison, "obtain", refuse_memory):
        worker.appliance_compare()


def loaded_in(site: Site, config: Any, load_format: str) -> dict[str, Any]:
    """Return whether a loader starts vLLM, whose configuration names this format, and what it refuses."""
    own = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
    started: list[Any] = []
    outcomes = site.folder / f"outcomes of {load_format}"
    outcomes.mkdir()
    with (
        patch.object(loading, "engine_config", lambda arguments: own),
        patch.object(loading, "_execute", started.append),
        patch.dict(os.environ),
    ):
        try:
            loading.load_all(site.target(), site.manifest, outcomes)
        except ApplianceError as error:
            return {"started": len(started), "error": str(error), "exit_status": error.exit_status}
    return {"started": len(started)}


REFUSED_ARGUMENTS = {
    "unknown": ["--no-such-option"],
    "no number": ["--max-num-seqs", "many"],
    "no choice": ["--kv-cache-dtype", "fp7"],
    "beside others": ["--max-model-len", "99999999"],
}


def refused_arguments(folder: Path) -> dict[str, list[Any]]:
    """Return how a loader ends for each, and how what serves does."""
    found = {}
    for name, arguments in REFUSED_ARGUMENTS.items():
        words = [str(folder), "--load-format", "appliance", *arguments]
        try:
            engine_config(words)
        except ApplianceError as error:
            found[name] = [error.exit_status, str(error)]
        with patch.object(sys, "argv", ["serve", *words]), patch.object(ServeSubcommand, "cmd", configured):
            found[name].append(command_line.main())
    return found


def configured(parsed: Any) -> None:
    """Do as `vllm serve` does before it listens."""
    AsyncEngineArgs.from_cli_args(parsed).create_engine_config()


if __name__ == "__main__":
    # vLLM logs to standard output.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    engine = {"kind": "vllm", "port": 18000, "args": [*ARGUMENTS, *CACHE]}
    site = Site(folder / "site", make_checkpoint(folder / "made"), engine=engine)
    config = engine_config([str(site.checkpoint), *ARGUMENTS, "--load-format", "appliance"])
    found = {
        "parity": {
            "from disk": parity_ended(site, refuse_memory),
            "attached": parity_ended(site, lambda *arguments: None, fill_gpu),
            "in a worker": parity_ended(site, lambda *arguments: None, fail_in_a_worker),
            "bug": parity_ended(site, fail),
        },
        "replaced": {"larger": said_of_donation(config, 1, 2), "as large": said_of_donation(config, 2, 2)},
        "attaching": told(folder / "attaching", lambda: attach_without_memory(site, config)),
        "comparing": told(folder / "comparing", lambda: compare_without_memory(config)),
        "unknown writers": [name for name in WRITERS if not hasattr(Worker, name)],
        "refused arguments": refused_arguments(site.checkpoint),
        "loading": {name: loaded_in(site, config, name) for name in ("appliance", "bitsandbytes")},
    }
    print(json.dumps(found), file=results, flush=True)
    os._exit(0)
