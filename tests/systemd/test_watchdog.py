import asyncio

import pytest

from appliance.engine.__main__ import _feed_watchdog
from appliance.notify import Notifier

TURNS = 5


@pytest.mark.parametrize(("working", "fed"), [(True, TURNS), (False, 0)])
def test_the_watchdog_is_fed_only_while_the_model_answers(
    monkeypatch: pytest.MonkeyPatch, working: bool, fed: int
) -> None:
    messages: list[str] = []
    notifier = Notifier({"WATCHDOG_USEC": "30000"})
    monkeypatch.setattr(notifier, "watchdog", lambda: messages.append("WATCHDOG=1"))
    asked: list[bool] = []
    enough = asyncio.Event()

    def is_working() -> bool:
        asked.append(working)
        if len(asked) == TURNS:
            enough.set()
        return working

    async def scenario() -> None:
        feeding = asyncio.create_task(_feed_watchdog(notifier, is_working))
        await asyncio.wait_for(enough.wait(), 10)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)

    asyncio.run(scenario())
    assert len(messages) == fed
