"""Notices that a checkpoint's signature has been replaced, by looking at it: that works on every file system.

A copy in progress is not a new checkpoint: nothing is reported before the whole folder has come to rest.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from appliance.checkpoint.files import SIGNATURE_NAME

INTERVAL_S = 1.0
SETTLE_S = 2.0

_MOST_FILES = 10_000

# Device, inode, size, mtime and ctime: a file that was replaced or written to differs in one of them.
_Look = tuple[int, int, int, int, int]
_T = TypeVar("_T")


class Watch:
    """Calls `changed` when the signature in a checkpoint's folder has become another.

    If that returns False, the checkpoint is not in order yet, and the next change of any of its files is reported.
    """

    def __init__(
        self,
        directory: Path,
        changed: Callable[[], Awaitable[bool]],
        *,
        interval_s: float | None = None,
        settle_s: float | None = None,
    ) -> None:
        self._directory = directory
        self._changed = changed
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._settle_s = SETTLE_S if settle_s is None else settle_s
        self._distrusted = False
        self._refused: dict[str, _Look] | None = None

    def distrust(self) -> None:
        """Report the next change of any file, not only of the signature: what is there now was refused."""
        self._distrusted = True

    def trust(self) -> None:
        """Report changes of the signature alone again: what is there now is in order."""
        self._distrusted, self._refused = False, None

    async def run(self) -> None:
        """Watch until cancelled. A file system that hangs holds up this watch and nothing else."""
        signature = await _aside(self._look_at_signature)
        while True:
            await asyncio.sleep(self._interval_s)
            if self._distrusted and self._refused is None:
                self._refused = await _aside(self._look_at_all)
            if not await self._differs(signature):
                continue
            files = await self._rest()
            found = files.get(SIGNATURE_NAME)
            if found is None:  # taken away again while we waited for rest
                continue
            self._distrusted = False
            signature = found
            self._refused = None if await self._changed() else files

    async def _differs(self, signature: _Look | None) -> bool:
        if await _aside(self._look_at_signature) not in (None, signature):
            return True
        refused = self._refused
        return refused is not None and refused != await _aside(self._look_at_all)

    async def _rest(self) -> dict[str, _Look]:
        """Return the folder's files once nothing about them has changed for a while."""
        loop = asyncio.get_running_loop()
        files, since = await _aside(self._look_at_all), loop.time()
        while loop.time() - since < self._settle_s:
            await asyncio.sleep(min(self._interval_s, self._settle_s))
            now = await _aside(self._look_at_all)
            if now != files:
                files, since = now, loop.time()
        return files

    def _look_at_signature(self) -> _Look | None:
        return _look(self._directory / SIGNATURE_NAME)

    def _look_at_all(self) -> dict[str, _Look]:
        looks: dict[str, _Look] = {}
        for folder, _, names in os.walk(self._directory):
            for name in names:
                path = Path(folder, name)
                if (look := _look(path)) is not None:
                    looks[str(path.relative_to(self._directory))] = look
            if len(looks) > _MOST_FILES:  # no checkpoint; its signature is in the topmost folder, seen first
                break
        return looks


def _look(path: Path) -> _Look | None:
    try:
        status = path.stat()
    except OSError:  # being replaced, or unreachable for now
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


async def _aside(look: Callable[[], _T]) -> _T:
    """Return what `look` returns, from a thread that nobody waits for at exit: a stat on a dead server never ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def deliver(result: _T) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        result = look()
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            loop.call_soon_threadsafe(deliver, result)

    threading.Thread(target=work, name="watch", daemon=True).start()
    return await future
