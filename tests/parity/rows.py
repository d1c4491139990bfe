"""`python -m tests.parity.rows FOLDER ROW...`, in vLLM's environment: each row served three times, a line of JSON each.

1. from disk, by vLLM's own loading
2. by an engine that finds its keeper empty and donates
3. attached, after the keeper was restarted and got its descriptors back as PID 1 gives them

An engine of a tiny model takes 2 s in a process that has imported vLLM, and 20 s in one of its own.
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from vllm import plugins
from vllm.v1.worker.gpu_worker import Worker

from appliance.demo.cache import default_cache
from appliance.demo.model import obtain
from appliance.errors import ConfigError
from appliance.keeper.settings import Slot
from appliance.manifest.shaping import NAMES_VARIABLE, shaping_variables
from appliance.target import Target, slots
from appliance.vllm import model_loader, parity
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.assignment import MANIFEST_VARIABLE, MODEL_VARIABLE, OUTCOMES_VARIABLE
from appliance.vllm.comparison import EXTENSION
from appliance.vllm.environment import environment
from appliance.vllm.outcome import read_all
from appliance.vllm.parity import answers
from tests.keeper.serving import Serving
from tests.parity.adapters import make_adapter
from tests.parity.answers import adapted_answers, prefixed_answers, proposals
from tests.parity.mappings import written_and_kept
from tests.parity.table import REAL, ROWS, Row
from tests.service_manager import ServiceManager
from tests.sites import MODEL, Site
from tests.vllm import vllm_process
from tests.vllm.checkpoints import make_checkpoint
from tests.vllm.drafts import add_draft

Result = TypeVar("Result")

ENGINES = ("disk", "donated", "attached")
ENGINE = {"kind": "vllm", "environment": vllm_process.ENGINE_SETTINGS}
ARGUMENTS = ["--max-model-len", "256", "--enforce-eager"]
# Before the first engine's environment names a cache of its own.
CACHE = default_cache()


@dataclasses.dataclass(frozen=True)
class Said:
    """What one engine said, what its draft proposed on the way, and how much of its weights lies in sealed memory."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    proposed: list[Any]
    mapped_bytes: int


def result_of(row: Row, folder: Path) -> dict[str, Any]:
    """Return what the three engines said, and what differs between the attached tensors and those on disk."""
    site = _site(row, folder)
    target = site.target()
    os.environ.update(environment(target, site.manifest))
    act = _act(row, folder)
    arguments = serve_arguments(
        MODEL,
        target.model,
        configs=target.identity.root.path,
        draft_configs=None if target.draft is None else target.draft.root.path,
    )
    disk = served([*arguments, "--load-format", "safetensors"], act)
    socket_folder = target.socket_path.parent
    socket_folder.mkdir(parents=True)
    with ServiceManager(folder) as manager:
        with _keeper(socket_folder, target, manager):
            donated, donors = _outcomes_of(arguments, act)
        with _keeper(socket_folder, target, manager, restarted=True):
            (attached, compared, reloaded), engines = _outcomes_of(
                [*arguments, *EXTENSION],
                lambda llm: (act(llm), llm.collective_rpc("appliance_compare")[0], _refusal_to_write(llm)),
            )
            more = {"alone": dataclasses.asdict(_alone(arguments, act, target))} if row.alone else {}
    return {
        "verdicts": {role: [verdict, engines[role]] for role, verdict in donors.items()},
        "stages": {shard.role: shard.stage for shard in compared},
        "reloaded": reloaded,
        "differing": [f"{shard.role}: {line}" for shard in compared for line in shard.differing],
        **{name: dataclasses.asdict(said) for name, said in zip(ENGINES, (disk, donated, attached), strict=True)},
        **more,
    }


def _alone(arguments: list[str], act: Callable[[Any], Said], target: Target) -> Said:
    """Return what an engine says that was told of no manifest, but of a keeper to ask."""
    told = json.dumps({"socket": str(target.socket_path)})
    taken = {name: os.environ.pop(name) for name in (MANIFEST_VARIABLE, MODEL_VARIABLE, NAMES_VARIABLE)}
    # As in a process of its own: vLLM adds variables for each engine, after it has loaded plugins.
    added = set(shaping_variables(os.environ)) - set(taken[NAMES_VARIABLE].split())
    taken |= {name: os.environ.pop(name) for name in added}
    plugins.plugins_loaded = False
    try:
        return served([*arguments, "--model-loader-extra-config", told], act)
    finally:
        os.environ.update(taken)


def _refusal_to_write(llm: Any) -> str:
    """Return why the engine writes to no weights that are there, in whichever way it is asked to; "" where it would."""
    refusals = [_refusal(llm, "reload_weights")]
    if hasattr(Worker, "reset_weights"):
        refusals.append(_refusal(llm, "reset_weights"))
    return refusals[0] if all(refusals) else ""


def _refusal(llm: Any, method: str) -> str:
    try:
        llm.collective_rpc(method)
    except ConfigError as error:
        return str(error)
    return ""


def _site(row: Row, folder: Path) -> Site:
    if row.architecture == REAL:
        checkpoint = obtain(CACHE, on_progress=lambda line: None)
    else:
        checkpoint = make_checkpoint(folder / "made", architecture=row.architecture, method=row.method)
    arguments = [*ARGUMENTS, *row.arguments]
    engine = {**ENGINE, "port": 18000, "args": arguments}
    draft = add_draft(folder / "draft", checkpoint, row.draft) if row.draft else None
    site = Site(folder, checkpoint, engine=engine, on_miss="load", draft=draft)
    if row.adapter:
        make_adapter(folder / "adapter", checkpoint)
    return site


def served(arguments: Sequence[str], act: Callable[[Any], Result]) -> Result:
    """Return what comes of an engine in this process.

    Each looks through all modules for kernels, and fails over one that numba brings: it is made for one engine.
    """
    hidden = {name: sys.modules.pop(name) for name in ["llvmlite.binding.ffi"] if name in sys.modules}
    # Nine times an engine looks for garbage among all that vLLM's modules hold, which is most of what it costs.
    gc.freeze()
    try:
        return parity.served(arguments, act)
    finally:
        sys.modules.update(hidden)


def _act(row: Row, folder: Path) -> Callable[[Any], Said]:
    def act(llm: Any) -> Said:
        proposed = proposals(llm)
        if row.adapter:
            said = adapted_answers(llm, folder / "adapter")
        else:
            said = prefixed_answers(llm) if row.prefix else answers(llm)
        return Said(said.tokens, said.logprobs, proposed, written_and_kept(llm))

    return act


@contextmanager
def _keeper(folder: Path, target: Target, manager: ServiceManager, *, restarted: bool = False) -> Iterator[Serving]:
    layout = [Slot(**slot) for slot in slots(target.model)]
    with Serving(folder, environ=manager.environ, layout=layout, target=target.fingerprint) as serving:
        if restarted:
            for shard in serving.custody.adopt(manager.handed_over()).shards:
                serving.put(shard)
        try:
            yield serving
        finally:
            _forget()


def _outcomes_of(arguments: list[str], act: Callable[[Any], Result]) -> tuple[Result, dict[str, str]]:
    """Return what comes of an engine with these arguments, and the verdict on each of its models."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[OUTCOMES_VARIABLE] = folder
        try:
            found = served(arguments, act)
        finally:
            del os.environ[OUTCOMES_VARIABLE]
        return found, {outcome.role: outcome.verdict for outcome in read_all(Path(folder))}


def _forget() -> None:
    """What an engine serves lasts as long as its process, and this one is the process of many."""
    while model_loader.SERVED:
        if (lease := model_loader.SERVED.pop().lease) is not None:
            lease.end()


def _clean_up() -> None:
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    # Before 0.30 vLLM leaves the dtype of a model that it could not build, and the next checkpoint is made with it.
    torch.set_default_dtype(torch.float32)


def main() -> None:
    """Print a line for each row; the error of one that fails is its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", nargs="+", choices=sorted(ROWS))
    arguments = parser.parse_args()
    # vLLM logs to standard output.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in arguments.rows:
        try:
            result = result_of(ROWS[name], arguments.folder / name.replace(" ", "-"))
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
            _forget()
            _clean_up()
        print(json.dumps({"row": name, **result}), file=results, flush=True)


if __name__ == "__main__":
    main()
    # What vLLM leaves running would keep the process for a while.
    os._exit(0)
