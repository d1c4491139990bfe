"""A replaced checkpoint: verified by a child process first; only then do keeper and engine start on it."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.run import ending
from appliance.up.description import Checkpoint
from appliance.up.environment import inherited
from appliance.up.group import MARK
from appliance.up.process import STDERR, STDOUT, Process

_KILL_TIMEOUT_S = 10.0


class Renewal:
    """Does that for one checkpoint. Whatever is wrong with the new one, what is serving goes on.

    `say` gets a line and whether it is bad news; `on_line` what the child writes to its standard error.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        directory: Path,
        restart: Callable[[str], Awaitable[None]],
        say: Callable[[str, bool], None],
        on_line: Callable[[str], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._mark = f"{directory}/verify@{checkpoint.model}"
        self._restart = restart
        self._say = say
        self._on_line = on_line
        self._answer = self._said = ""
        self.renewed = 0
        self.refused = 0

    async def renew(self) -> bool:
        """Verify the checkpoint as it is now and restart its units; False, after saying why, if it is refused."""
        self._say("the checkpoint has been replaced: verifying it", False)
        if (refusal := await self._refusal()) is not None:
            self.refused += 1
            self._say(f"the new checkpoint is refused, and the old one goes on being served: {refusal}", True)
            return False
        self._say("the new checkpoint is verified", False)
        try:
            for unit in self._checkpoint.restart:
                await self._restart(unit)
        except ApplianceError as error:
            self._say(f"the new checkpoint is verified, but it cannot be served: {error.message}", True)
            return False
        self.renewed += 1
        return True

    async def _refusal(self) -> str | None:
        self._answer = self._said = ""
        ended = asyncio.Event()
        try:
            process = Process(
                self._checkpoint.verify,
                environment=inherited(os.environ) | {MARK: self._mark},
                mark=self._mark,
                on_line=self._hear,
                on_exit=ended.set,
            )
        except OSError as error:
            return f"cannot be verified: {error.strerror}"
        try:
            await ended.wait()
        finally:
            # Also where the supervisor stops meanwhile: hashing a large checkpoint takes minutes.
            status, _ = await process.end(timeout_s=_KILL_TIMEOUT_S)
        if status != 0:
            return self._said or ("it did not end" if status is None else ending(status))
        return refusal_in(self._answer)

    def _hear(self, stream: str, line: str) -> None:
        if stream == STDOUT:
            self._answer = line
        elif stream == STDERR and line.strip():
            self._said = line.strip()
            self._on_line(line)


def refusal_in(answer: str) -> str | None:
    """Return why the last line of the child's output refuses the checkpoint; None if it does not."""
    try:
        body = json.loads(answer)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return "the verification gave no answer"
    refusal = body.get("refusal")
    if refusal is None:
        return None
    return str(refusal.get("detail", refusal)) if isinstance(refusal, dict) else str(refusal)
