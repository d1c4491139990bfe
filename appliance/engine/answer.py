"""What an answer is asked for by, and what it is made of. Values only: no torch in here."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# Below this a temperature only overflows: the largest logit is chosen anyway.
GREEDY_BELOW = 1e-5

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to stop. temperature 0 is greedy; top_k 0 and top_p 1 choose among all tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_p == 0


@dataclass(frozen=True)
class Piece:
    """What one token (or the end of the answer) added: its id, and the text that is now certain, which may be empty."""

    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Finish:
    """Why the answer ended, and how many tokens it took; an end-of-text token counts."""

    reason: StopReason
    completion_tokens: int


class Cancelled(Exception):
    """Nobody waits for this answer any more."""


class Answerer(Protocol):
    """What the worker needs of a language model."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        emit: Callable[[Piece], None],
        cancelled: threading.Event,
    ) -> Finish:
        """Call `emit` for every token and return why the answer ended; Cancelled soon after `cancelled` is set."""
