"""`python -m appliance.vllm.parity --manifest FILE --model NAME`: whether attached weights are those on disk.

1. vLLM serves the checkpoint by its own loading, and answers PROMPTS greedily
2. with --control it does so once more, from disk again: some kernels do not give the same twice
3. vLLM serves what the keeper holds, and answers them too: same tokens, same log probabilities
4. each rank loads its weights from disk once more, and compares every tensor with the attached ones

One line of JSON is printed. The exit status is 77 where anything differs.
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from appliance.checkpoint.identity import Identity
from appliance.errors import EXIT_TRUST, ApplianceError
from appliance.events import ERROR, event
from appliance.handover.source import Source
from appliance.handover.terms import Terms
from appliance.handover.weights import obtain, stage_of
from appliance.target import Target, read_target
from appliance.tensors.comparison import differences
from appliance.tensors.homes import Stage
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.command_line import parse
from appliance.vllm.environment import environment
from appliance.vllm.source import VllmSource

Result = TypeVar("Result")

MAX_TOKENS = 32
PROMPTS = tuple(
    f"{start} {end}"
    for start in ("The capital of", "A short story about", "Water boils when", "To restart a server,", "Once more,")
    for end in ("France is", "a lighthouse:", "it is", "one has to")
)


@dataclass(frozen=True)
class Answers:
    """What one engine said to PROMPTS: token ids, and the log probability of each."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Parity:
    """How two engines on one checkpoint compare; `differing` names tensors and flags by rank, a line each.

    `repeatable` is whether vLLM's own loading gives the same log probabilities twice; None if that was not tried.
    """

    model: str
    stages: tuple[str, ...]
    tokens: int
    same_tokens: bool
    same_logprobs: bool
    differing: tuple[str, ...]
    repeatable: bool | None = None

    @property
    def holds(self) -> bool:
        return self.same_tokens and self.same_logprobs and not self.differing


def parity(target: Target, *, control: bool = False) -> Parity:
    """Return how vLLM's own loading and the keeper's weights compare, in engines of this process, one after the other.

    The environment must be the one that `environment` returns.
    """
    with tempfile.TemporaryDirectory(prefix="appliance-parity-") as folder:
        # One path for both: what vLLM compiles for one of them, tuned by the clock, the other one is to find.
        configs = _linked(target.identity, Path(folder) / "target")
        draft_configs = None if target.draft is None else _linked(target.draft, Path(folder) / "draft")
        arguments = serve_arguments(target.name, target.model, configs=configs, draft_configs=draft_configs)
        disk = [*arguments, "--load-format", "safetensors"]
        expected = served(disk, answers)
        repeatable = served(disk, answers) == expected if control else None
        found, by_rank = served(
            [*arguments, *EXTENSION],
            lambda llm: (answers(llm), llm.collective_rpc("appliance_compare")),
        )
    compared: list[Compared] = [shard for shards in by_rank for shard in shards]
    return Parity(
        model=target.name,
        stages=tuple(shard.stage for shard in compared),
        tokens=sum(map(len, found.tokens)),
        same_tokens=found.tokens == expected.tokens,
        same_logprobs=found.logprobs == expected.logprobs,
        differing=tuple(f"{shard.role} {shard.rank}: {line}" for shard in compared for line in shard.differing),
        repeatable=repeatable,
    )


def _linked(identity: Identity, folder: Path) -> Path:
    """Make a folder that looks like the checkpoint; return it."""
    root = identity.root.path
    for path in identity.manifest.digests:
        link = folder / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root / path)
    return folder


@dataclass(frozen=True)
class Compared:
    """One shard's stage, and in what it differs from the same weights loaded from disk, a line each."""

    role: str
    rank: int
    stage: str
    differing: tuple[str, ...]


class Comparison:
    """Mixed into vLLM's worker: compares the keeper's shards of its rank with what it loads from disk."""

    vllm_config: Any

    def appliance_compare(self) -> list[Compared]:
        """Return how the model and its draft, if it has one, compare."""
        from vllm.config import set_current_vllm_config

        from appliance.vllm.model_loader import SERVED

        with set_current_vllm_config(self.vllm_config):
            return [_compared(served.source, served.terms) for served in list(SERVED)]


# What has vLLM mix it in.
EXTENSION = ("--worker-extension-cls", f"{Comparison.__module__}.{Comparison.__qualname__}")


def _compared(source: VllmSource, terms: Terms) -> Compared:
    """Compare with the source that the served module is of: building a model changes the configuration it reads."""
    weights = obtain(terms, _Unfinished(source), client_name="parity")
    try:
        stage = stage_of(weights.record)
        loaded = source.load(stage, lambda text: None)
        found = differences(loaded.module, weights.module, opaque=source.opaque)
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


def served(arguments: Sequence[str], act: Callable[[Any], Result]) -> Result:
    """Return what comes of an engine of vLLM in this process, set up as `vllm serve` with these arguments would be."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    settings = AsyncEngineArgs.from_cli_args(parse(arguments))
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    llm = LLM(**{name: value for name, value in vars(settings).items() if name in names})
    try:
        return act(llm)
    finally:
        # Before the next one starts: the last reference to it would take that one's process groups away.
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def answers(llm: Any) -> Answers:
    """Return the greedy answers to PROMPTS."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)
    outputs = [output.outputs[0] for output in llm.generate(list(PROMPTS), sampling, use_tqdm=False)]
    return Answers(
        tuple(tuple(output.token_ids) for output in outputs),
        tuple(
            tuple(step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True))
            for output in outputs
        ),
    )


def main() -> int:
    """Compare one model of the manifest whose weights are resident; return the exit status."""
    parser = argparse.ArgumentParser(prog="appliance parity", description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--control", action="store_true", help="also serve from disk twice")
    arguments = parser.parse_args()
    try:
        target = read_target(arguments.manifest, arguments.model)
        os.environ.update(environment(target, arguments.manifest))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        result = parity(target, control=arguments.control)
    except ApplianceError as error:
        event(f"appliance: {error}", priority=ERROR, model=arguments.model)
        return error.exit_status
    print(json.dumps(dataclasses.asdict(result)), flush=True)
    return 0 if result.holds else EXIT_TRUST


if __name__ == "__main__":
    sys.exit(main())
