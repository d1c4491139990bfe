"""The worker's half of parity: each rank compares the weights that it has attached with what it loads from disk."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from appliance.errors import ApplianceError
from appliance.handover.source import Source
from appliance.handover.terms import Terms
from appliance.handover.weights import obtain, stage_of
from appliance.tensors.comparison import differences
from appliance.tensors.homes import Stage
from appliance.vllm.assignment import OUTCOMES_VARIABLE
from appliance.vllm.outcome import Outcome, write
from appliance.vllm.shortage import telling_shortage
from appliance.vllm.source import VllmSource


@dataclass(frozen=True)
class Compared:
    """One shard's stage, and in what it differs from the same weights loaded from disk, a line each."""

    role: str
    rank: int
    stage: str
    differing: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}"


class Comparison:
    """Mixed into vLLM's worker: compares the keeper's shards of its rank with what it loads from disk."""

    vllm_config: Any

    def appliance_compare(self) -> list[Compared]:
        """Return how the model and its draft, if it has one, compare."""
        from vllm.config import set_current_vllm_config

        from appliance.vllm.model_loader import SERVED

        with set_current_vllm_config(self.vllm_config):
            return [_compared_or_told(served.source, served.terms) for served in list(SERVED)]


# What has vLLM mix it in.
EXTENSION = ("--worker-extension-cls", f"{Comparison.__module__}.{Comparison.__qualname__}")


def _compared_or_told(source: VllmSource, terms: Terms) -> Compared:
    """Compare; an error is also told to the process that started vLLM, as vLLM passes on its text at best."""
    try:
        with telling_shortage(f"{source.role} rank {source.rank}: loading once more beside what is attached"):
            return _compared(source, terms)
    except ApplianceError as error:
        write(os.environ.get(OUTCOMES_VARIABLE), Outcome(role=source.role, rank=source.rank).failed(error))
        raise


def _compared(source: VllmSource, terms: Terms) -> Compared:
    """Compare with the source that the served module is of: building a model changes the configuration it reads."""
    weights = obtain(terms, _Unfinished(source), client_name="parity")
    try:
        stage = stage_of(weights.record)
        loaded = source.load(stage, lambda text: None)
        found = differences(loaded.module, weights.module, opaque=source.opaque, unused=source.unused)
        return Compared(source.role, source.rank, stage, tuple(found))
    finally:
        if weights.client is not None:
            weights.client.close()


class _Unfinished:
    """A source whose `loaded` weights are left as they came, to be compared: post-processing may hide tensors."""

    def __init__(self, source: VllmSource) -> None:
        self._source: Source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def finish(self, module: torch.nn.Module, stage: Stage) -> torch.nn.Module:
        return module.eval() if stage == "loaded" else self._source.finish(module, stage)
