"""vLLM's part of the loader: its own executor, stopped after loading. Each worker fills the slot of its rank."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.checkpoint.contents import read_configs
from appliance.checkpoint.verification import verified_stats
from appliance.errors import ApplianceError, error_of_status
from appliance.target import Target
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
    identity, state = target.identity, target.manifest.directories.state
    files = read_configs(identity.root, identity.manifest)
    configs = kept_configs(state, identity.root_digest, files)
    with _verification(target):
        vllm_config = _vllm_config(serve_arguments(target.name, target.model, configs=configs))
    try:
        _execute(vllm_config)
    except Exception as error:
        # What a worker raises reaches us as text, if at all.
        for outcome in read_all(outcomes):
            if outcome.exit_status:
                raise error_of_status(outcome.exit_status, outcome.error) from error
        raise


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


def _vllm_config(arguments: list[str]) -> Any:
    """Return what `vllm serve` would make of its command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine_arguments = AsyncEngineArgs.from_cli_args(parse(arguments))
    # Nothing is computed here, so no memory is needed beside the weights.
    engine_arguments.gpu_memory_utilization = 0.01
    return engine_arguments.create_engine_config()


def _execute(vllm_config: Any) -> None:
    from vllm.v1.executor import Executor

    executor = Executor.get_class(vllm_config)(vllm_config)
    executor.shutdown()
    del executor
    gc.collect()
