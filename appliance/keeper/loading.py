"""Runs the loader as a child until every slot is filled, with back-off, and knows which failures no retry cures."""

import asyncio
import contextlib
from collections.abc import Sequence

from appliance.errors import EXIT_HOST, NOT_CURED_BY_RESTART
from appliance.events import ERROR, WARNING, event
from appliance.keeper.holdings import Holdings
from appliance.keeper.settings import ChildError

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
TERMINATE_TIMEOUT_S = 10.0


async def fill(holdings: Holdings, argv: Sequence[str], *, model: str) -> None:
    """Return when every slot is filled; ChildError when the loader says that trying again is of no use.

    Other failures are tried again for as long as it takes: the disk may come back.
    """
    retry_s = FIRST_RETRY_S
    while holdings.missing:
        holdings.progress = "starting the loader"
        holdings.touch()
        status = await _run(argv)
        holdings.progress = ""
        if not holdings.missing:
            return
        if status in NOT_CURED_BY_RESTART:
            holdings.trouble = f"the loader ended with status {status}; its own message says what to do"
            event(holdings.trouble, priority=ERROR, model=model)
            raise ChildError(holdings.trouble, exit_status=status)
        holdings.trouble = f"{_ended(status)}; trying again in {retry_s:g} s"
        event(holdings.trouble, priority=WARNING, model=model)
        holdings.touch()
        # An engine may fill the slots meanwhile.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_filled(holdings), retry_s)
        retry_s = min(retry_s * 2, LAST_RETRY_S)
    holdings.trouble = ""


async def _filled(holdings: Holdings) -> None:
    while holdings.missing:
        await holdings.changed()


async def _run(argv: Sequence[str]) -> int:
    try:
        child = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
    except OSError as error:
        event(f"cannot start the loader {argv[0]}: {error.strerror}", priority=ERROR)
        return EXIT_HOST
    try:
        return await child.wait()
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                await asyncio.wait_for(child.wait(), TERMINATE_TIMEOUT_S)
            except TimeoutError:
                child.kill()
                await child.wait()


def _ended(status: int) -> str:
    if status < 0:
        return f"the loader was killed by signal {-status}"
    return "the loader ended without donating" if status == 0 else f"the loader failed with status {status}"
