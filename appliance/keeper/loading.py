"""Runs the loader as a child while slots are empty that nobody else fills, and knows which failures no retry cures."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from appliance.errors import EXIT_HOST, NOT_CURED_BY_RESTART
from appliance.events import ERROR, WARNING, event
from appliance.keeper.holdings import Holdings
from appliance.keeper.settings import ChildError

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
TERMINATE_TIMEOUT_S = 10.0

Result = TypeVar("Result")


async def fill(holdings: Holdings, argv: Sequence[str], *, model: str) -> None:
    """Return when there is nothing to load any more: every slot is filled, or being filled, or they were evicted.

    ChildError when the loader says that trying again is of no use. Other failures are tried again for as long as it
    takes: the disk may come back.
    """
    retry_s = FIRST_RETRY_S
    while holdings.unattended:
        holdings.progress = "starting the loader"
        holdings.touch()
        status = await _until(holdings, lambda: holdings.evicted, _run(holdings, argv))
        holdings.progress = ""
        if status is None or not holdings.missing:
            break
        if status in NOT_CURED_BY_RESTART:
            holdings.trouble = f"the loader ended with status {status}; its own message says what to do"
            event(holdings.trouble, priority=ERROR, model=model)
            raise ChildError(holdings.trouble, exit_status=status)
        holdings.trouble = f"{_ended(status)}; trying again in {retry_s:g} s"
        event(holdings.trouble, priority=WARNING, model=model)
        holdings.touch()
        # An engine may fill the slots meanwhile.
        await _until(holdings, lambda: not holdings.unattended, asyncio.sleep(retry_s))
        retry_s = min(retry_s * 2, LAST_RETRY_S)
    holdings.touch()


async def _until(holdings: Holdings, stop: Callable[[], bool], work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return what the work returns; or None, with the work cancelled, once `stop` holds after a change."""
    task = asyncio.create_task(work)
    try:
        while not task.done() and not stop():
            change = asyncio.ensure_future(holdings.changed())
            try:
                await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _run(holdings: Holdings, argv: Sequence[str]) -> int:
    try:
        child = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
    except OSError as error:
        event(f"cannot start the loader {argv[0]}: {error.strerror}", priority=ERROR)
        return EXIT_HOST
    holdings.loader_pid = child.pid
    try:
        return await child.wait()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                await asyncio.wait_for(child.wait(), TERMINATE_TIMEOUT_S)
            except TimeoutError:
                child.kill()
                await child.wait()
        holdings.loader_pid = None


def _ended(status: int) -> str:
    if status < 0:
        return f"the loader was killed by signal {-status}"
    return "the loader ended without donating" if status == 0 else f"the loader failed with status {status}"
