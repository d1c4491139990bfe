"""vLLM's part of the loader: its own executor, stopped after loading. Each worker fills the slot of its rank."""

import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from appliance.checkpoint.contents import read_configs
from appliance.checkpoint.identity import Identity
from appliance.checkpoint.verification import verified_stats
from appliance.errors import ApplianceError, ResourceError, error_of_status
from appliance.slabs.devices import CPU
from appliance.target import Target, devices
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.assignment import LOADER_VARIABLE, OUTCOMES_VARIABLE
from appliance.vllm.command_line import parse
from appliance.vllm.configs_folder import kept_configs
from appliance.vllm.environment import environment
from appliance.vllm.outcome import read_all


def load_all(target: Target, manifest: Path, outcomes: Path) -> None:
    """Return once every rank's slot is filled; the error of the rank that could not fill its own."""
    os.environ.update(environment(target, manifest))
    os.environ.update({LOADER_VARIABLE: "1", OUTCOMES_VARIABLE: str(outcomes)})
    configs = _kept_configs(target, target.identity)
    draft_configs = None if target.draft is None else _kept_configs(target, target.draft)
    with _verification(target):
        vllm_config = engine_config(
            serve_arguments(target.name, target.model, configs=configs, draft_configs=draft_configs)
        )
    try:
        _execute(vllm_config, gpus=[device for device in devices(target.model) if device != CPU])
    except Exception as error:
        # What a worker raises reaches us as text, if at all.
        for outcome in read_all(outcomes):
            if outcome.exit_status:
                raise error_of_status(outcome.exit_status, outcome.error) from error
        raise


def engine_config(arguments: list[str]) -> Any:
    """Return what `vllm serve` would make of its command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine_arguments = AsyncEngineArgs.from_cli_args(parse(arguments))
    # Nothing is computed here, so no memory is needed beside the weights.
    engine_arguments.gpu_memory_utilization = 0.01
    return engine_arguments.create_engine_config()


def become_replica(vllm_config: Any, index: int, gpus: Sequence[str]) -> None:
    """Set this process and a configuration up as one data-parallel rank, as vLLM's engine core sets up its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    parallel = vllm_config.parallel_config
    parallel.data_parallel_index = parallel.data_parallel_rank_local = index
    if vllm_config.model_config.is_moe:
        parallel.data_parallel_rank = index
    else:
        # Dense replicas are engines of their own.
        parallel.data_parallel_size = parallel.data_parallel_size_local = 1
        parallel.data_parallel_rank = 0


def _kept_configs(target: Target, identity: Identity) -> Path:
    files = read_configs(identity.root, identity.manifest)
    return kept_configs(target.manifest.directories.state, identity, files)


@contextlib.contextmanager
def _verification(target: Target) -> Iterator[None]:
    """Hash the checkpoint while vLLM is imported: the workers find what was found here."""
    found: list[ApplianceError] = []

    def verify() -> None:
        try:
            verified_stats(target.identity, target.manifest.directories.state)
        except ApplianceError as error:
            found.append(error)

    thread = threading.Thread(target=verify, name="verification")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if found:
        raise found[0]


def _execute(vllm_config: Any, *, gpus: Sequence[str]) -> None:
    """Run one executor for each replica, all at once: those of a mixture of experts know of each other."""
    replicas = vllm_config.parallel_config.data_parallel_size
    if replicas == 1:
        _execute_one(vllm_config)
        return
    context = multiprocessing.get_context("spawn")
    share = len(gpus) // replicas
    processes = [
        context.Process(target=_replica, args=(vllm_config, index, gpus[index * share : (index + 1) * share]))
        for index in range(replicas)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [str(index) for index, process in enumerate(processes) if process.exitcode]:
        raise ResourceError(f"vLLM's executor of replica {', '.join(failed)} failed", hint="see its messages above")


def _replica(vllm_config: Any, index: int, gpus: Sequence[str]) -> None:
    become_replica(vllm_config, index, gpus)
    _execute_one(vllm_config)


def _execute_one(vllm_config: Any) -> None:
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor import Executor

    load_general_plugins()
    executor = Executor.get_class(vllm_config)(vllm_config)
    executor.shutdown()
    del executor
    gc.collect()
