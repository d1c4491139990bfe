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

    `restart` returns when the next unit may follow. `say` gets a line and whether it is bad news; `on_line` gets what
    the child writes to its standard error.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        directory: Path,
        restart: Callable[[str], Awaitable[None]],
        say: Callable[[str, bool], None],
        on_line: Callable[[str], None],
        on_bug: Callable[[BaseException | None], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._mark = f"{directory}/verify@{checkpoint.model}"
        self._restart = restart
        self._say = say
        self._on_line = on_line
        self._on_bug = on_bug
        self._answer = self._said = ""
        self._roll_out: asyncio.Task[None] | None = None
        self._verifying = self._restarting = False
        self.renewed = 0
        self.refused = 0

    @property
    def busy(self) -> bool:
        """True while its units may still be started on a new checkpoint."""
        return self._verifying or self._restarting

    async def renew(self) -> bool:
        """Verify the checkpoint as it is now; False, after saying why, if it is refused.

        Its units are restarted afterwards, one after another; the next that is verified takes over from there.
        """
        self._say("the checkpoint has been replaced: verifying it", False)
        self._verifying = True
        try:
            refusal = await self._refusal()
        finally:
            self._verifying = False
        if refusal is not None:
            self.refused += 1
            self._say(f"the new checkpoint is refused, and the old one goes on being served: {refusal}", True)
            return False
        await self.close()
        self._restarting = True
        self._say("the new checkpoint is verified", False)
        self._roll_out = asyncio.create_task(self._restart_all(), name=f"renew@{self._checkpoint.model}")
        self._roll_out.add_done_callback(lambda task: None if task.cancelled() else self._on_bug(task.exception()))
        return True

    async def close(self) -> None:
        """Restart nothing more."""
        if self._roll_out is not None:
            self._roll_out.cancel()
            await asyncio.gather(self._roll_out, return_exceptions=True)
            self._roll_out = None

    async def _restart_all(self) -> None:
        trouble = None
        try:
            for unit in self._checkpoint.restart:
                await self._restart(unit)
        except ApplianceError as error:
            trouble = error
        finally:
            self._restarting = False
        if trouble is not None:
            self._say(f"the new checkpoint is verified, but it is not served: {trouble.message}", True)
        else:
            self.renewed += 1
            self._say("the new checkpoint is taken", False)

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
