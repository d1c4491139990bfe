"""`python -m appliance.vllm.parity --manifest FILE --model NAME`: whether attached weights are those on disk.

1. vLLM serves the checkpoint by its own loading, and answers PROMPTS greedily
2. vLLM serves what the keeper holds, and answers them too: same tokens, same log probabilities
3. each rank loads its weights from disk once more, and compares every tensor with the attached ones
4. with --control N vLLM does 1 and 2 so often once more, in turns: it may choose other kernels at each start

Data-parallel replicas do so in a process each, all at once. One line of JSON is printed. The exit status is 77 where
tensors differ, or all answers where vLLM's own loading was not seen to give others; 75 where there is no memory.
"""

import argparse
import dataclasses
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from appliance.checkpoint.identity import Identity
from appliance.errors import EXIT_TRUST, ApplianceError
from appliance.events import ERROR, event
from appliance.lifeline import end_with_parent
from appliance.ports import free_port
from appliance.target import Target, read_target
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.assignment import OUTCOMES_VARIABLE
from appliance.vllm.command_line import parse
from appliance.vllm.comparison import EXTENSION, Compared
from appliance.vllm.environment import environment
from appliance.vllm.loading import engine_config
from appliance.vllm.outcome import failure
from appliance.vllm.parity_memory import memory_arguments
from appliance.vllm.parity_result import Answers, Parity, error_of_end, merged
from appliance.vllm.replicas import take_part
from appliance.vllm.shortage import telling_shortage

Result = TypeVar("Result")

MAX_TOKENS = 32
PROMPTS = tuple(
    f"{start} {end}"
    for start in ("The capital of", "A short story about", "Water boils when", "To restart a server,", "Once more,")
    for end in ("France is", "a lighthouse:", "it is", "one has to")
)


@dataclass(frozen=True)
class Replica:
    """Which of several this process is, and the port on which those of a mixture of experts meet."""

    index: int
    port: int


def parity(target: Target, *, controls: int = 0, replica: Replica | None = None) -> Parity:
    """Return how vLLM's own loading and the keeper's weights compare, in engines of this process, one after the other.

    The environment must be the one that `environment` returns. Of several replicas they are those of one. ResourceError
    where memory runs out.
    """
    with tempfile.TemporaryDirectory(prefix="appliance-parity-") as folder:
        # One path for both: what vLLM compiles for one of them, tuned by the clock, the other one is to find.
        configs = _linked(target.identity, Path(folder) / "target")
        draft_configs = None if target.draft is None else _linked(target.draft, Path(folder) / "draft")
        arguments = serve_arguments(target.name, target.model, configs=configs, draft_configs=draft_configs)
        if replica is not None:
            arguments += take_part(engine_config(arguments), replica.index, port=replica.port)
        loading, attaching = memory_arguments(target, arguments)
        disk, attached = [*arguments, "--load-format", "safetensors", *loading], [*arguments, *EXTENSION, *attaching]
        own: list[Answers] = []
        found: list[Answers] = []
        by_rank: list[list[Compared]] = []
        for _ in range(1 + controls):
            with telling_shortage(f"{target.name}: serving from disk"):
                own.append(served(disk, answers))
            with telling_shortage(f"{target.name}: serving what the keeper holds"):
                if found:
                    found.append(served(attached, answers))
                    continue
                given, by_rank = served(attached, lambda llm: (answers(llm), llm.collective_rpc("appliance_compare")))
                found.append(given)
    return Parity.of(target.name, [shard for shards in by_rank for shard in shards], own=own, attached=found)


def _linked(identity: Identity, folder: Path) -> Path:
    """Make a folder that looks like the checkpoint; return it."""
    root = identity.root.path
    for path in identity.manifest.digests:
        link = folder / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root / path)
    return folder


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


def parity_of_replicas(argv: Sequence[str], count: int) -> Parity:
    """Return what `argv` finds of each of so many replicas, all at once in processes of their own, as one.

    The error of the first that fails: the others end then, as replicas may wait for each other.
    """
    with ThreadPoolExecutor(count) as pool, ExitStack() as ends:
        port = free_port()
        processes = []
        for index in range(count):
            own = [*argv, "--replica", str(index), "--port", str(port)]
            processes.append(subprocess.Popen(own, stdout=subprocess.PIPE, text=True))
            ends.callback(processes[-1].kill)
        said = {pool.submit(process.communicate): process for process in processes}
        found = []
        for future in as_completed(said):
            output, _ = future.result()
            if (result := Parity.read(output)) is None:
                raise error_of_end(said[future].returncode, f"replica {processes.index(said[future])}")
            found.append(result)
    return merged(found)


def main() -> int:
    """Compare one model of the manifest whose weights are resident; return the exit status."""
    parser = argparse.ArgumentParser(prog="appliance parity", description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--control", type=int, nargs="?", default=0, const=1, help="serve both ways so often once more")
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.control < 0:
        parser.error("--control: how often is no negative number")
    try:
        target = read_target(arguments.manifest, arguments.model)
        count = target.model.parallel.data
        if count > 1 and arguments.replica is None:
            result = parity_of_replicas([sys.executable, "-m", "appliance.vllm.parity", *sys.argv[1:]], count)
        else:
            end_with_parent()
            os.environ.update(environment(target, arguments.manifest))
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            replica = None if count == 1 else Replica(arguments.replica, arguments.port)
            with _telling_failures():
                result = parity(target, controls=arguments.control, replica=replica)
    except ApplianceError as error:
        event(f"appliance: {error}", priority=ERROR, model=arguments.model)
        return error.exit_status
    print(result.line(), flush=True)
    return 0 if result.holds else EXIT_TRUST


@contextmanager
def _telling_failures() -> Iterator[None]:
    """Have an engine that fails in here end with what one of its ranks says is wrong: vLLM passes on text, if that."""
    with tempfile.TemporaryDirectory(prefix="appliance-outcomes-") as outcomes:
        os.environ[OUTCOMES_VARIABLE] = outcomes
        try:
            yield
        except Exception as error:
            if isinstance(error, ApplianceError) or (told := failure(Path(outcomes))) is None:
                raise
            raise told from error


if __name__ == "__main__":
    sys.exit(main())
