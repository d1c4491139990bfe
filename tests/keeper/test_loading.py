"""The loader runs while slots are empty that nobody else fills, and is tried again where that may help."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from appliance.descriptors import Descriptor
from appliance.errors import NOT_CURED_BY_RESTART
from appliance.keeper import loading
from appliance.keeper.holdings import Holdings
from appliance.keeper.settings import ChildError
from appliance.keeper.shard import Shard
from tests.keeper.shards import Filling, shard_of, slots

WAIT_TIMEOUT_S = 20.0


class Loader:
    """A program that announces each run, does as told, and stands for a loader; the test itself fills the slots."""

    def __init__(self, folder: Path, code: str) -> None:
        path = folder / "runs"
        os.mkfifo(path)
        self._reading = Descriptor(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        self._code = "import os, signal, sys, time; "
        self._code += f"say = os.open({str(path)!r}, os.O_WRONLY); os.write(say, b'x'); {code}"
        self._runs = 0

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-IS", "-c", self._code]

    @property
    def runs(self) -> int:
        """How often it has announced itself so far."""
        with contextlib.suppress(BlockingIOError):
            self._runs += len(os.read(self._reading.fileno(), 100))
        return self._runs

    def close(self) -> None:
        self._reading.close()

    async def announced(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        while self.runs < count:
            more = asyncio.Event()
            loop.add_reader(self._reading.fileno(), more.set)
            await more.wait()
            loop.remove_reader(self._reading.fileno())


MakeLoader = Callable[[str], Loader]


@pytest.fixture
def make_loader(tmp_path: Path) -> Iterator[MakeLoader]:
    made: list[Loader] = []

    def make(code: str) -> Loader:
        made.append(Loader(tmp_path, code))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(loading, "LAST_RETRY_S", 0.02)


def filling(loader: Loader, act: Callable[[Holdings], Awaitable[None]] | None = None, *, ranks: int = 1) -> Holdings:
    """Run `fill` to its end while `act` does something, and return the holdings."""

    async def run() -> Holdings:
        holdings = Holdings()
        holdings.lay_out(slots(ranks))
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            task = asyncio.create_task(loading.fill(holdings, loader.argv, model="m"))
            if act is not None:
                await act(holdings)
            await task
        return holdings

    return asyncio.run(run())


async def until(holdings: Holdings, condition: Callable[[], bool]) -> None:
    while not condition():
        await holdings.changed()


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def put(holdings: Holdings, *, rank: int = 0) -> Shard:
    shard = shard_of(rank=rank)
    holdings.put(shard)
    shard.close()
    return shard


def test_nothing_is_started_where_nothing_is_missing(make_loader: MakeLoader) -> None:
    loader = make_loader("sys.exit(1)")

    async def run() -> None:
        holdings = Holdings()
        holdings.lay_out(slots())
        put(holdings)
        await loading.fill(holdings, loader.argv, model="m")

    asyncio.run(run())
    assert loader.runs == 0


def test_a_loader_that_fills_every_slot_ends_the_filling(make_loader: MakeLoader) -> None:
    loader = make_loader("time.sleep(0.05)")

    async def donate(holdings: Holdings) -> None:
        await until(holdings, lambda: holdings.progress == "starting the loader")
        put(holdings)

    holdings = filling(loader, donate)
    assert loader.runs == 1
    assert (holdings.progress, holdings.trouble) == ("", "")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("code", ["sys.exit(1)", "sys.exit(71)", "os.kill(os.getpid(), signal.SIGKILL)", "pass"])
def test_a_loader_that_fails_is_tried_again(
    make_loader: MakeLoader, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = make_loader(code)

    async def donate_at_the_third(holdings: Holdings) -> None:
        await loader.announced(3)
        assert "trying again" in holdings.trouble
        put(holdings)
        assert holdings.trouble == ""

    assert filling(loader, donate_at_the_third).trouble == ""
    assert loader.runs == 3
    assert capsys.readouterr().err.count("trying again") == 2


@pytest.mark.parametrize("status", sorted(NOT_CURED_BY_RESTART))
def test_a_loader_that_says_it_is_of_no_use_is_not_tried_again(make_loader: MakeLoader, status: int) -> None:
    loader = make_loader(f"sys.exit({status})")
    with pytest.raises(ChildError, match=f"ended with status {status}") as caught:
        filling(loader)
    assert caught.value.exit_status == status
    assert loader.runs == 1


def test_an_engine_that_donates_during_the_back_off_ends_it(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "FIRST_RETRY_S", 600.0)
    loader = make_loader("sys.exit(1)")

    async def donate(holdings: Holdings) -> None:
        await until(holdings, lambda: "trying again" in holdings.trouble)
        put(holdings)

    holdings = filling(loader, donate)
    assert loader.runs == 1
    assert holdings.trouble == ""


def test_an_engine_that_begins_to_fill_during_the_back_off_is_left_to_it(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "FIRST_RETRY_S", 600.0)
    loader = make_loader("sys.exit(1)")

    async def offer(holdings: Holdings) -> None:
        await until(holdings, lambda: "trying again" in holdings.trouble)
        holdings.set_donor(("target", 0), Filling())

    assert filling(loader, offer).missing
    assert loader.runs == 1


def test_nothing_is_started_while_somebody_else_fills_every_slot(make_loader: MakeLoader) -> None:
    loader = make_loader("sys.exit(1)")

    async def run() -> None:
        holdings = Holdings()
        holdings.lay_out(slots())
        holdings.set_donor(("target", 0), Filling())
        await loading.fill(holdings, loader.argv, model="m")

    asyncio.run(run())
    assert loader.runs == 0


def test_an_eviction_ends_the_loader_and_the_filling(make_loader: MakeLoader) -> None:
    loader = make_loader("time.sleep(600)")
    others = children()

    async def evict(holdings: Holdings) -> None:
        await loader.announced(1)
        assert holdings.loaders() == dict.fromkeys(children() - others, "loader") != {}
        holdings.evicted = True
        holdings.touch()

    holdings = filling(loader, evict)
    assert holdings.missing
    assert not holdings.loading
    assert holdings.loaders() == {}


def test_an_eviction_ends_the_back_off(make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "FIRST_RETRY_S", 600.0)
    loader = make_loader("sys.exit(1)")

    async def evict(holdings: Holdings) -> None:
        await until(holdings, lambda: "trying again" in holdings.trouble)
        holdings.evicted = True
        holdings.touch()

    filling(loader, evict)
    assert loader.runs == 1


def test_a_loader_that_ignores_sigterm_is_killed(make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "TERMINATE_TIMEOUT_S", 0.1)
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(say, b'x'); time.sleep(600)"
    loader = make_loader(code)

    async def run() -> None:
        holdings = Holdings()
        holdings.lay_out(slots())
        task = asyncio.create_task(loading.fill(holdings, loader.argv, model="m"))
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            await loader.announced(2)
            task.cancel()
            await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_a_loader_that_cannot_be_started_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        holdings = Holdings()
        holdings.lay_out(slots())
        task = asyncio.create_task(loading.fill(holdings, ["/nonexistent/loader"], model="m"))
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            await until(holdings, lambda: "failed with status 71" in holdings.trouble)
            put(holdings)
            await task

    asyncio.run(run())
    assert "cannot start the loader /nonexistent/loader: No such file" in capsys.readouterr().err
