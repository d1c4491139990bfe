"""vLLM's part of the loader: its own executor, stopped after loading. Each worker fills the slot of its rank."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from appliance.checkpoint.contents import read_configs
from appliance.checkpoint.identity import Identity
from appliance.checkpoint.verification import verified_stats
from appliance.errors import ApplianceError
from appliance.target import Target
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.assignment import LOADER_VARIABLE, OUTCOMES_VARIABLE
from appliance.vllm.command_line import parse, telling_refusals
from appliance.vllm.configs_folder import kept_configs
from appliance.vllm.environment import environment
from appliance.vllm.outcome import failure
from appliance.vllm.refusals import refuse_other_loaders
from appliance.vllm.replicas import become_replica, in_processes


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
    refuse_other_loaders(vllm_config)
    try:
        _execute(vllm_config)
    except Exception as error:
        # What a worker raises reaches us as text, if at all.
        if (told := failure(outcomes)) is not None:
            raise told from error
        raise


def engine_config(arguments: list[str]) -> Any:
    """Return what `vllm serve` would make of its command line; ConfigError where it refuses that."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine_arguments = AsyncEngineArgs.from_cli_args(parse(arguments))
    # Nothing is computed here, so no memory is needed beside the weights.
    engine_arguments.gpu_memory_utilization = 0.01
    with telling_refusals():
        return engine_arguments.create_engine_config()


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


def _execute(vllm_config: Any) -> None:
    """Run one executor for each replica, all at once: those of a mixture of experts know of each other."""
    replicas = vllm_config.parallel_config.data_parallel_size
    if replicas == 1:
        _execute_one(vllm_config)
        return
    in_processes(partial(_replica, vllm_config), replicas)


def _replica(vllm_config: Any, index: int) -> None:
    become_replica(vllm_config, index)
    _execute_one(vllm_config)


def _execute_one(vllm_config: Any) -> None:
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor import Executor

    load_general_plugins()
    executor = Executor.get_class(vllm_config)(vllm_config)
    executor.shutdown()
    del executor
    gc.collect()
