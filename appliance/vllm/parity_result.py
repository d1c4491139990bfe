"""What a comparison found, as the line of JSON in which it goes from process to process."""

import dataclasses
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from appliance.errors import ApplianceError, HostError, ResourceError, error_of_status

_BEGIN = '{"model"'


@dataclass(frozen=True)
class Answers:
    """What one engine said to some prompts: token ids, and the log probability of each."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


class Shard(Protocol):
    """What a rank found of a shard: its role and rank, its stage, a line for each difference."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def differing(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Parity:
    """How two engines on one checkpoint compare; `differing` names tensors and flags by shard, a line each.

    `stages` has the stage of every shard, by role and rank. Answers are the same if those of one start with attached
    weights are, to the last bit of a log probability, those of one by vLLM's own loading: no other weights give them.
    `controls` is how often more vLLM served each way. It is `repeated` how often its own loading said then what it had
    said at first, and `agreed` how many starts with attached weights said what one of its own had said.
    """

    model: str
    stages: dict[str, str]
    tokens: int
    same_tokens: bool
    same_logprobs: bool
    differing: tuple[str, ...]
    controls: int = 0
    repeated: int = 0
    agreed: int = 0

    @classmethod
    def of(cls, model: str, shards: Sequence[Shard], *, own: Sequence[Answers], attached: Sequence[Answers]) -> Self:
        """Return how shards and answers compare: those of each start by vLLM's own loading, and of each attached."""
        agreed = sum(answers in own for answers in attached)
        return cls(
            model=model,
            stages={shard.name: shard.stage for shard in shards},
            tokens=sum(map(len, attached[0].tokens)),
            same_tokens=any(given.tokens == expected.tokens for given in attached for expected in own),
            same_logprobs=agreed > 0,
            differing=tuple(f"{shard.name}: {line}" for shard in shards for line in shard.differing),
            controls=len(own) - 1,
            repeated=own[1:].count(own[0]),
            agreed=agreed,
        )

    @property
    def same_answers(self) -> bool:
        return self.same_tokens and self.same_logprobs

    @property
    def repeatable(self) -> bool | None:
        """Whether vLLM's own loading repeats its own answers; None if that was not tried."""
        return self.repeated == self.controls if self.controls else None

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the weights: answers do only where vLLM's own loading repeats them."""
        return not self.differing and (self.same_answers or self.repeatable is False)

    @classmethod
    def read(cls, said: str) -> Self | None:
        """Return the last one in what a process printed, vLLM's own lines among it; None where there is none."""
        line = next((line for line in reversed(said.splitlines()) if line.startswith(_BEGIN)), None)
        if line is None:
            return None
        found = json.loads(line)
        return cls(**{**found, "differing": tuple(found["differing"])})

    def line(self) -> str:
        """Return it in one line."""
        return json.dumps(dataclasses.asdict(self))


def merged(replicas: Sequence[Parity]) -> Parity:
    """Return what was found of a model's replicas as one, which holds if each does."""
    # That one replica does not repeat itself excuses none that does, and differs.
    unlike = [replica.repeated for replica in replicas if not replica.same_answers]
    repeated = max(unlike) if unlike else min(replica.repeated for replica in replicas)
    return Parity(
        model=replicas[0].model,
        stages={shard: stage for replica in replicas for shard, stage in replica.stages.items()},
        tokens=sum(replica.tokens for replica in replicas),
        same_tokens=all(replica.same_tokens for replica in replicas),
        same_logprobs=all(replica.same_logprobs for replica in replicas),
        differing=tuple(line for replica in replicas for line in replica.differing),
        controls=replicas[0].controls,
        repeated=repeated,
        agreed=min(replica.agreed for replica in replicas),
    )


def error_of_end(status: int, who: str) -> ApplianceError:
    """Return why a process that compares, or the one that waits for it, ended with this status and no result."""
    if status == -signal.SIGKILL:
        return ResourceError(
            f"{who}: not compared: it was killed, as the kernel does where host memory runs out",
            hint="see the kernel's messages; stop what else runs on this host, or compare where there is more memory",
        )
    if status > 1:
        return error_of_status(status, f"{who}: not compared; what is wrong is said above")
    return HostError(f"{who}: not compared: vLLM ended with status {status}", hint="see its messages above")
