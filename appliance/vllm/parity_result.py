"""What a comparison found, as the line of JSON in which it goes from process to process."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_BEGIN = '{"model"'


@dataclass(frozen=True)
class Parity:
    """How two engines on one checkpoint compare; `differing` names tensors and flags by shard, a line each.

    `stages` has the stage of every shard, by role and rank. `repeatable` is whether vLLM's own loading gives the same
    log probabilities twice; None if that was not tried.
    """

    model: str
    stages: dict[str, str]
    tokens: int
    same_tokens: bool
    same_logprobs: bool
    differing: tuple[str, ...]
    repeatable: bool | None = None

    @property
    def holds(self) -> bool:
        return self.same_tokens and self.same_logprobs and not self.differing

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
    """Return what was found of a model's replicas as one."""
    tried = [replica.repeatable for replica in replicas if replica.repeatable is not None]
    return Parity(
        model=replicas[0].model,
        stages={shard: stage for replica in replicas for shard, stage in replica.stages.items()},
        tokens=sum(replica.tokens for replica in replicas),
        same_tokens=all(replica.same_tokens for replica in replicas),
        same_logprobs=all(replica.same_logprobs for replica in replicas),
        differing=tuple(line for replica in replicas for line in replica.differing),
        repeatable=all(tried) if tried else None,
    )
