import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import HostError
from appliance.up.description import Checkpoint
from appliance.up.renewal import Renewal, refusal_in
from tests.up.stage import TIMEOUT_S, puppet, until


class Scene:
    def __init__(self, folder: Path, *steps: str) -> None:
        self.restarted: list[str] = []
        self.said: list[tuple[str, bool]] = []
        self.lines: list[str] = []
        self.trouble: dict[str, Exception] = {}
        self.bugs: list[BaseException | None] = []
        self.hold = ""
        checkpoint = Checkpoint("chat", (folder,), puppet(*steps), ("weights@chat", "engine@chat"))
        self.renewal = Renewal(
            checkpoint,
            directory=folder,
            restart=self._restart,
            say=self._say,
            on_line=self.lines.append,
            on_bug=self.bugs.append,
        )

    def renewed(self) -> bool:
        """Return what `renew` returns, after the restarts that follow it."""

        async def whole() -> bool:
            verified = await self.renewal.renew()
            await until(lambda: not self.renewal.busy)
            return verified

        verified = asyncio.run(asyncio.wait_for(whole(), TIMEOUT_S))
        assert not any(self.bugs)
        return verified

    async def _restart(self, unit: str) -> None:
        self.restarted.append(unit)
        if unit in self.trouble:
            raise self.trouble[unit]
        await until(lambda: self.hold != unit)

    def _say(self, text: str, serious: bool) -> None:
        self.said.append((text, serious))


def test_a_verified_checkpoint_restarts_its_units_in_order(folder: Path) -> None:
    scene = Scene(folder, "say progress%2012%20files", 'say {"target":{},"refusal":null}')
    assert scene.renewed()
    assert scene.restarted == ["weights@chat", "engine@chat"]
    assert (scene.renewal.renewed, scene.renewal.refused) == (1, 0)
    assert not any(serious for _, serious in scene.said)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (("complain a.safetensors: differs", "exit 77"), "a.safetensors: differs"),
        (("exit 77",), "exited with status 77"),
        (("die SIGKILL",), "ended by SIGKILL"),
        (('say {"refusal":{"detail":"b.safetensors%20is%20missing","exit_status":77}}',), "b.safetensors is missing"),
        (('say {"refusal":"no%20key"}',), "no key"),
        (("exit 0",), "gave no answer"),
        (("say all is well",), "gave no answer"),
        (("say {}", "say not this"), "gave no answer"),
        (("say {}", "complain late trouble", "exit 1"), "late trouble"),
    ],
)
def test_whatever_is_wrong_with_it_nothing_is_restarted_and_the_reason_is_told(
    folder: Path, steps: tuple[str, ...], why: str
) -> None:
    scene = Scene(folder, *steps)
    assert not scene.renewed()
    assert scene.restarted == []
    text, serious = scene.said[-1]
    assert serious and why in text and "refused" in text
    assert (scene.renewal.renewed, scene.renewal.refused) == (0, 1)


def test_a_unit_that_does_not_come_up_on_it_is_told_and_the_next_is_left_alone(folder: Path) -> None:
    scene = Scene(folder, "say {}")
    scene.trouble["weights@chat"] = HostError("weights@chat failed: no memory")
    assert scene.renewed()
    assert scene.renewal.renewed == 0
    assert scene.restarted == ["weights@chat"]
    assert scene.said[-1][1] and "no memory" in scene.said[-1][0]


def test_the_next_verified_checkpoint_takes_over_from_one_whose_units_do_not_come_up(folder: Path) -> None:
    scene = Scene(folder, "say {}")
    scene.hold = "weights@chat"

    async def scenario() -> None:
        assert await scene.renewal.renew()
        await until(lambda: scene.restarted)
        assert scene.renewal.busy
        again = asyncio.create_task(scene.renewal.renew())
        await again
        await until(lambda: len(scene.restarted) == 2)
        scene.hold = ""
        await until(lambda: not scene.renewal.busy)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    assert scene.restarted == ["weights@chat", "weights@chat", "engine@chat"]
    assert scene.renewal.renewed == 1


def test_a_refused_checkpoint_does_not_break_off_the_restarts_on_the_one_before(folder: Path) -> None:
    scene = Scene(folder, f"unless {folder}/first exit 77", "say {}")
    (folder / "first").touch()
    scene.hold = "weights@chat"

    async def scenario() -> None:
        assert await scene.renewal.renew()
        await until(lambda: scene.restarted)
        (folder / "first").unlink()
        assert not await scene.renewal.renew()
        scene.hold = ""
        await until(lambda: not scene.renewal.busy)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    assert scene.restarted == ["weights@chat", "engine@chat"]


def test_nothing_is_restarted_once_it_is_closed(folder: Path) -> None:
    scene = Scene(folder, "say {}")
    scene.hold = "weights@chat"

    async def scenario() -> None:
        await scene.renewal.renew()
        await until(lambda: scene.restarted)
        await scene.renewal.close()
        assert not scene.renewal.busy

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    assert scene.restarted == ["weights@chat"]


def test_a_bug_during_the_restarts_is_handed_on(folder: Path) -> None:
    scene = Scene(folder, "say {}")
    scene.trouble["weights@chat"] = ZeroDivisionError()
    with pytest.raises(AssertionError):
        scene.renewed()
    assert isinstance(scene.bugs[-1], ZeroDivisionError)


def test_what_the_verification_complains_of_is_shown(folder: Path) -> None:
    scene = Scene(folder, "complain hashing again", "say {}")
    scene.renewed()
    assert scene.lines == ["hashing again"]


@pytest.mark.parametrize("answer", ["[]", "1", "null", "", "{", "[" * 100_000, '{"refusal"}'])
def test_what_is_no_object_is_no_answer(answer: str) -> None:
    assert refusal_in(answer) == "the verification gave no answer"


@given(st.text(max_size=50))
def test_any_text_is_an_answer_or_a_reason(answer: str) -> None:
    refusal = refusal_in(answer)
    assert refusal is None or isinstance(refusal, str)
