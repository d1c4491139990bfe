import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from appliance.up.watch import Watch
from tests.up.stage import TIMEOUT_S, until

INTERVAL_S, SETTLE_S = 0.01, 0.05


class Scene:
    """A checkpoint under watch, and what was reported of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reports: list[str] = []
        self.answers: Iterator[bool] = iter([])
        self.looks = 0
        self.watch = Watch(directory, self._changed, interval_s=INTERVAL_S, settle_s=SETTLE_S)

    def write(self, name: str, text: str) -> None:
        """Replace a file at once, as a careful copy does."""
        new = self.directory / f".{name}.new"
        new.write_text(text)
        new.replace(self.directory / name)

    async def reported(self, count: int) -> None:
        await until(lambda: len(self.reports) == count)

    async def some_looks(self) -> None:
        """Return after the watch has had time to report, if it were to."""
        await asyncio.sleep(2 * SETTLE_S + 20 * INTERVAL_S)

    def play(self, scenario: Callable[[], Awaitable[None]], *, answers: tuple[bool, ...] = (True,) * 9) -> None:
        self.answers = iter(answers)

        async def whole() -> None:
            task = asyncio.create_task(self.watch.run())
            try:
                await asyncio.sleep(5 * INTERVAL_S)
                async with asyncio.timeout(TIMEOUT_S):
                    await scenario()
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

        asyncio.run(whole())

    async def _changed(self) -> bool:
        self.reports.append((self.directory / "model.sig").read_text())
        return next(self.answers)


@pytest.fixture
def scene(folder: Path) -> Scene:
    scene = Scene(folder)
    scene.write("model.sig", "first")
    scene.write("a.safetensors", "weights")
    return scene


def test_what_stays_as_it_is_is_never_reported(scene: Scene) -> None:
    async def scenario() -> None:
        await scene.some_looks()
        os.utime(scene.directory / "a.safetensors")
        scene.write("a.safetensors", "changed, but not signed anew")
        await scene.some_looks()

    scene.play(scenario)
    assert scene.reports == []


@pytest.mark.parametrize("way", ["replaced", "written", "same text"])
def test_a_new_signature_is_reported_once(scene: Scene, way: str) -> None:
    async def scenario() -> None:
        if way == "written":
            (scene.directory / "model.sig").write_text("second")
        else:
            scene.write("model.sig", "second" if way == "replaced" else "first")
        await scene.reported(1)
        await scene.some_looks()

    scene.play(scenario)
    assert scene.reports == ["first" if way == "same text" else "second"]


def test_each_further_signature_is_reported(scene: Scene) -> None:
    async def scenario() -> None:
        for count, text in enumerate(["second", "third", "fourth"], start=1):
            scene.write("model.sig", text)
            await scene.reported(count)

    scene.play(scenario)
    assert scene.reports == ["second", "third", "fourth"]


def test_a_copy_in_progress_is_not_reported_before_it_rests(scene: Scene) -> None:
    async def scenario() -> None:
        scene.write("model.sig", "second")
        for size in range(30):
            (scene.directory / "b.safetensors").write_text("x" * size)
            await asyncio.sleep(SETTLE_S / 5)
            assert scene.reports == []
        await scene.reported(1)

    scene.play(scenario)


def test_a_signature_that_is_away_for_a_while_is_reported_when_it_is_back(scene: Scene) -> None:
    async def scenario() -> None:
        (scene.directory / "model.sig").unlink()
        await scene.some_looks()
        assert scene.reports == []
        scene.write("model.sig", "second")
        await scene.reported(1)

    scene.play(scenario)


def test_a_signature_that_is_taken_away_again_is_not_reported(scene: Scene) -> None:
    async def scenario() -> None:
        scene.write("model.sig", "second")
        await asyncio.sleep(SETTLE_S / 2)
        (scene.directory / "model.sig").unlink()
        await scene.some_looks()

    scene.play(scenario)
    assert scene.reports == []


def test_the_first_signature_of_a_checkpoint_is_reported(folder: Path) -> None:
    scene = Scene(folder)

    async def scenario() -> None:
        scene.write("model.sig", "first")
        await scene.reported(1)

    scene.play(scenario)


def test_a_folder_that_is_swapped_for_another_is_reported(folder: Path) -> None:
    for name in ("old", "new"):
        (folder / name).mkdir()
        (folder / name / "model.sig").write_text(name)
    (folder / "current").symlink_to("old")
    scene = Scene(folder / "current")

    async def scenario() -> None:
        (folder / "next").symlink_to("new")
        (folder / "next").replace(folder / "current")
        await scene.reported(1)

    scene.play(scenario)
    assert scene.reports == ["new"]


def test_after_a_refusal_the_next_change_of_any_file_is_reported(scene: Scene) -> None:
    async def scenario() -> None:
        scene.write("model.sig", "second")
        await scene.reported(1)
        await scene.some_looks()
        assert len(scene.reports) == 1
        scene.write("a.safetensors", "the file that was missing")
        await scene.reported(2)
        scene.write("a.safetensors", "now in order, so this is nobody's business")
        await scene.some_looks()

    scene.play(scenario, answers=(False, True))
    assert scene.reports == ["second", "second"]


def test_what_is_distrusted_is_reported_at_the_next_change_of_any_file(scene: Scene) -> None:
    async def scenario() -> None:
        scene.watch.distrust()
        await scene.some_looks()
        assert scene.reports == []
        scene.write("a.safetensors", "put right")
        await scene.reported(1)

    scene.play(scenario)


def test_a_signature_replaced_right_after_a_refusal_elsewhere_is_not_missed(scene: Scene) -> None:
    async def scenario() -> None:
        scene.watch.distrust()
        scene.write("model.sig", "second")
        await scene.reported(1)

    scene.play(scenario)


def test_a_change_while_the_last_one_is_looked_into_is_reported_after_it(scene: Scene) -> None:
    async def changed() -> bool:
        scene.reports.append((scene.directory / "model.sig").read_text())
        if len(scene.reports) == 1:
            scene.write("model.sig", "third")
        return True

    scene.watch = Watch(scene.directory, changed, interval_s=INTERVAL_S, settle_s=SETTLE_S)

    async def scenario() -> None:
        scene.write("model.sig", "second")
        await scene.reported(2)

    scene.play(scenario)
    assert scene.reports == ["second", "third"]


def test_a_file_system_that_hangs_holds_up_nothing_but_its_own_watch(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    hanging = threading.Event()

    def hang(self: Watch) -> None:
        hanging.set()
        released.wait(TIMEOUT_S)

    monkeypatch.setattr(Watch, "_look_at_signature", hang)

    async def scenario() -> None:
        await until(hanging.is_set)

    scene.play(scenario)
    released.set()
