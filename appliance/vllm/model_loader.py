"""The load format `appliance`: a model loader of vLLM that maps the keeper's weights, or fills the keeper's slot."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from appliance.client import KeeperClient
from appliance.errors import ApplianceError, ConfigError
from appliance.events import ERROR, WARNING, event
from appliance.handover.lease import Lease
from appliance.handover.terms import Terms
from appliance.handover.weights import fill, obtain
from appliance.quantities import format_phases
from appliance.slabs.devices import CPU
from appliance.target import DRAFT, TARGET, Target
from appliance.verdict import Outcome as VerdictOutcome
from appliance.vllm.assignment import OUTCOMES_VARIABLE, STARTER_VARIABLE, Assignment, assignment
from appliance.vllm.outcome import Outcome, write
from appliance.vllm.refusals import refuse_movers
from appliance.vllm.shortage import telling_shortage
from appliance.vllm.source import VllmSource, load_device, role_of, uuid_of
from appliance.vllm.writers import class_of, guard


@dataclass(frozen=True)
class Served:
    """One model of this process, and the lease of what it has mapped: none where that is a copy."""

    source: VllmSource
    terms: Terms
    lease: Lease | None


# For as long as the process lives: what is mapped has to be leased.
SERVED: list[Served] = []


class ApplianceModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Made by vLLM in every worker. Raises ApplianceError; vLLM then ends with a status of its own."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: weights come from the keeper, or from the checkpoint of the manifest."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Refuse: the mapped weights cannot be written, and others would no longer be those that were verified."""
        self.get_all_weights(model_config, model)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> NoReturn:
        """Refuse what vLLM asks for where weights are to be loaded anew, as `load_weights` does."""
        raise ConfigError(
            "weights of the load format `appliance` cannot be loaded anew in place",
            hint="put the new checkpoint in place of the old one and restart the engine",
        )

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Return the model, attached to the keeper's shard of this rank."""
        began = time.monotonic()
        outcome = Outcome(role="", rank=-1)
        try:
            refuse_movers(vllm_config)
            assigned = assignment(
                os.environ,
                self.load_config.model_loader_extra_config or {},
                model_path=model_config.model,
                role=role_of(vllm_config, model_config),
            )
            source = source_of(
                vllm_config, model_config, prefix=prefix, target=assigned.target, computes=not assigned.loads
            )
            outcome = Outcome(role=source.role, rank=source.rank)
            name = assigned.name
            if source.role != TARGET or source.rank:
                name += f" {source.role} rank {source.rank}"
            _tell_of_waiting(assigned)
            take = fill if assigned.loads else obtain
            before_bytes = _free_bytes(vllm_config)
            with telling_shortage(name):
                weights = take(assigned.terms, source, client_name=name)
            if weights.verdict.outcome is VerdictOutcome.DONATED and _free_bytes(vllm_config) > before_bytes:
                _warn_of_more_room()
            source.claim(weights.module)
        except ApplianceError as error:
            _tell(outcome, error)
            raise
        terms, lease = assigned.terms, None
        if weights.client is not None:
            shard_id = weights.record.shard_id
            lease = Lease(weights.client, terms.socket_path, shard_id=shard_id, name=name, leave=_end_the_engine)
        SERVED.append(Served(source, terms, lease))
        if source.role == TARGET:
            guard(class_of(vllm_config.parallel_config.worker_cls), is_attached=is_attached)
        phases = {**weights.phases_s, "model_load": time.monotonic() - began}
        ended = outcome.ended(weights.verdict, phases, weights.record)
        write(os.environ.get(OUTCOMES_VARIABLE), ended)
        if assigned.target is None:
            _tell_verdict(ended)  # there is no process of ours that would
        return weights.module

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Return the bytes of device memory in which this rank's weights lie already, held by nobody's context.

        vLLM counts them as its own when it divides the memory, so that its utilization means what it says. It asks
        before it loads, since 0.32.
        """
        try:
            assigned = assignment(
                os.environ, self.load_config.model_loader_extra_config or {}, model_path=vllm_config.model_config.model
            )
            if assigned.loads:
                return 0  # a loader computes nothing, and is given no memory to divide
            _tell_of_waiting(assigned)
            with KeeperClient.connect(assigned.terms.socket_path, timeout_s=assigned.terms.wait_s) as client:
                slots = client.status()["shards"]
        except ApplianceError as error:
            _tell(Outcome(role="", rank=-1), error)
            raise
        device = uuid_of(load_device(vllm_config))
        return sum(slot["size_bytes"] for slot in slots if slot["device"] == device)


def is_attached(worker: Any) -> bool:
    """Tell whether the weights of this worker of vLLM are attached."""
    return any(served.source.is_of(worker.vllm_config) for served in SERVED)


def source_of(
    vllm_config: Any, model_config: Any, *, prefix: str, target: Target | None, computes: bool = True
) -> VllmSource:
    """Return the source of this worker's model, or of the draft to the one that it has loaded before."""
    of_targets = (served.source.rank for served in reversed(SERVED) if served.source.role == TARGET)
    rank = next(of_targets, None) if role_of(vllm_config, model_config) == DRAFT else None
    return VllmSource(vllm_config, model_config, prefix=prefix, target=target, target_rank=rank, computes=computes)


def _free_bytes(vllm_config: Any) -> int:
    """Return how much of this worker's GPU is free; of a CPU nobody asks."""
    device = load_device(vllm_config)
    return 0 if device.type == CPU else int(torch.cuda.mem_get_info(device)[0])


def _warn_of_more_room() -> None:
    """Say why vLLM may end when it profiles memory: it takes it that nothing was freed since it started."""
    event(
        "smaller weights took the place of larger ones after vLLM had measured the GPU's memory: if it ends over that, "
        "start it again",
        priority=WARNING,
    )


def _tell_of_waiting(assigned: Assignment) -> None:
    """Say what an engine that nobody watches is going to wait for: a path may be mistyped."""
    terms = assigned.terms
    # Not Path's: that raises where a name is too long, or a folder may not be looked into.
    if assigned.target is None and not os.path.exists(terms.socket_path):  # noqa: PTH110
        event(f"no keeper at {terms.socket_path} yet: waiting for it for up to {terms.wait_s:g} s", priority=WARNING)


def _tell_verdict(outcome: Outcome) -> None:
    phases = format_phases(outcome.phases_s)
    event(
        f"weights: {outcome.verdict} ({outcome.stage}, {outcome.role} rank {outcome.rank}); {phases}",
        verdict=outcome.verdict,
        root_digest=outcome.root_digest,
    )


def _tell(outcome: Outcome, error: ApplianceError) -> None:
    event(f"appliance: {error}", priority=ERROR)
    write(os.environ.get(OUTCOMES_VARIABLE), outcome.failed(error))


def _end_the_engine() -> None:
    """Have the whole engine end, requests first: a worker that ends alone takes it down with an error."""
    starter = os.environ.get(STARTER_VARIABLE)
    if starter is None:
        event("the keeper needs this memory for other weights: restart this engine", priority=WARNING)
    else:
        os.kill(int(starter), signal.SIGTERM)
