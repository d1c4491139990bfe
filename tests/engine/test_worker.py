"""One answer after the other, from a queue that has an end, for clients that may leave at any moment."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from appliance.engine.answer import Cancelled, Finish, Piece, Sampling
from appliance.engine.worker import QueueFull, Worker, WorkerClosed

FOUR = Sampling(max_tokens=4)


class Steps:
    """Answers with as many pieces as asked for, each only when the test lets it. The prompt's first id is its name."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.began: list[int] = []
        self.cancelled: list[int] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        emit: Callable[[Piece], None],
        cancelled: threading.Event,
    ) -> Finish:
        self._note(self.began, prompt_ids[0])
        for number in range(sampling.max_tokens):
            while not self.allowed.acquire(timeout=0.01):
                if cancelled.is_set():
                    self._note(self.cancelled, prompt_ids[0])
                    raise Cancelled
            if self.error is not None:
                raise self.error
            emit(Piece(f"{prompt_ids[0]}.{number} ", (number,)))
        return Finish("length", sampling.max_tokens)

    def allow(self, count: int) -> None:
        self.allowed.release(count)

    async def until(self, condition: Callable[[], bool]) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(condition, timeout=10)

        assert await asyncio.to_thread(wait)

    def _note(self, where: list[int], name: int) -> None:
        with self._changed:
            where.append(name)
            self._changed.notify_all()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_pieces_arrive_while_the_answer_is_being_made(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        with worker.place() as place:
            pieces = place.answer([1], FOUR)
            steps.allow(1)
            assert await anext(pieces) == Piece("1.0 ", (0,))
            assert worker.is_answering
            steps.allow(3)
            assert [piece async for piece in pieces][-1] == Finish("length", 4)
        assert worker.queue_depth == 0

    play(steps, scenario)


def test_requests_are_answered_in_the_order_they_came(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        steps.allow(100)
        answers = await asyncio.gather(*(ask(worker, name) for name in (1, 2, 3)))
        assert steps.began == [1, 2, 3]
        assert answers == [f"{name}.0 {name}.1 {name}.2 {name}.3 " for name in (1, 2, 3)]

    play(steps, scenario)


def test_a_full_queue_refuses_and_says_when_to_come_back(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        running = [asyncio.create_task(ask(worker, name)) for name in (1, 2, 3)]
        await steps.until(lambda: steps.began == [1])
        assert worker.queue_depth == 2
        with pytest.raises(QueueFull) as caught, worker.place():
            pass
        assert caught.value.retry_after_s == 3  # a second for each, until it is known how long they take
        steps.allow(100)
        await asyncio.gather(*running)
        assert await ask(worker, 4)

    play(steps, scenario, queue_limit=2)


def test_a_place_counts_before_its_prompt_is_there_and_is_free_when_it_is_left(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        with worker.place(), worker.place():
            with pytest.raises(QueueFull), worker.place():
                pass
            assert worker.queue_depth == 2
        steps.allow(4)
        assert await ask(worker, 1)

    play(steps, scenario, queue_limit=1)


def test_without_a_queue_one_request_after_the_other_is_never_refused(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        steps.allow(400)
        for name in range(100):
            await ask(worker, name)

    play(steps, scenario, queue_limit=0)


def test_who_leaves_while_being_answered_makes_room_for_the_next(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        first = asyncio.create_task(ask(worker, 1))
        await steps.until(lambda: steps.began == [1])
        second = asyncio.create_task(ask(worker, 2))
        await cancel(first)
        await steps.until(lambda: steps.began == [1, 2])
        assert steps.cancelled == [1]
        steps.allow(4)
        assert await second == "2.0 2.1 2.2 2.3 "

    play(steps, scenario)


def test_who_leaves_while_waiting_is_never_begun_and_frees_its_place_at_once(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        first, second = asyncio.create_task(ask(worker, 1)), asyncio.create_task(ask(worker, 2))
        await steps.until(lambda: steps.began == [1])
        await cancel(second)
        assert worker.queue_depth == 0
        third = asyncio.create_task(ask(worker, 3))
        steps.allow(8)
        await asyncio.gather(first, third)
        assert steps.began == [1, 3]

    play(steps, scenario, queue_limit=1)


@pytest.mark.parametrize("error", [ValueError("bad"), MemoryError(), SystemExit(3), KeyboardInterrupt()])
def test_an_answer_that_fails_tells_its_own_client_only(steps: Steps, error: BaseException) -> None:
    async def scenario(worker: Worker) -> None:
        steps.error = error
        steps.allow(1)
        with pytest.raises(type(error) if isinstance(error, Exception) else RuntimeError):
            await ask(worker, 1)
        steps.error = None
        steps.allow(4)
        assert await ask(worker, 2)
        assert worker.is_alive

    play(steps, scenario)


def test_closing_tells_everybody_and_ends_the_thread(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        tasks = [asyncio.create_task(ask(worker, name)) for name in (1, 2, 3)]
        await steps.until(lambda: steps.began == [1])
        await asyncio.to_thread(worker.close)
        assert [type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)] == [WorkerClosed] * 3
        assert not worker.is_alive
        with pytest.raises(WorkerClosed), worker.place():
            pass
        assert worker.queue_depth == 0

    play(steps, scenario)


def test_a_place_that_is_filled_after_closing_is_told(steps: Steps) -> None:
    async def scenario(worker: Worker) -> None:
        with worker.place() as place:
            await asyncio.to_thread(worker.close)
            with pytest.raises(WorkerClosed):
                await anext(place.answer([1], FOUR))

    play(steps, scenario)


def test_a_model_that_does_not_stop_is_left_behind_with_a_word(steps: Steps, capfd: pytest.CaptureFixture[str]) -> None:
    hung = threading.Event()

    class Hangs(Steps):
        def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Finish:
            self._note(self.began, prompt_ids[0])
            hung.wait()
            raise Cancelled

    hanging = Hangs()

    async def scenario(worker: Worker) -> None:
        task = asyncio.create_task(ask(worker, 1))
        await hanging.until(lambda: hanging.began == [1])
        await asyncio.to_thread(worker.close, timeout_s=0.05)
        assert "did not stop within 0.05 s" in capfd.readouterr().err
        hung.set()
        with pytest.raises(WorkerClosed):
            await task

    play(hanging, scenario)


def test_a_worker_that_never_started_can_be_closed(steps: Steps) -> None:
    Worker(steps, queue_limit=0).close()


def test_a_loop_that_is_gone_does_not_stop_the_worker(steps: Steps) -> None:
    with running(steps) as worker:
        place = worker.place()
        entered = place.__enter__()

        async def abandon() -> None:
            pieces = entered.answer([1], FOUR)
            steps.allow(1)
            await anext(pieces)
            await pieces.aclose()

        asyncio.run(abandon())
        steps.allow(3)
        place.__exit__(None, None, None)
        steps.allow(4)
        assert asyncio.run(ask(worker, 2)).endswith("2.3 ")


async def ask(worker: Worker, name: int) -> str:
    text = ""
    with worker.place() as place:
        async for piece in place.answer([name], FOUR):
            text += piece.text if isinstance(piece, Piece) else ""
    return text


async def cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@contextmanager
def running(model: Steps, *, queue_limit: int = 8) -> Iterator[Worker]:
    worker = Worker(model, queue_limit=queue_limit)
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


def play(steps: Steps, scenario: Callable[[Worker], Coroutine[Any, Any, None]], *, queue_limit: int = 8) -> None:
    async def timed(awaitable: Awaitable[None]) -> None:
        async with asyncio.timeout(20):
            await awaitable

    with running(steps, queue_limit=queue_limit) as worker:
        asyncio.run(timed(scenario(worker)))
