"""Answers requests one after the other on a thread of its own, from a queue of bounded length.

The event loop never waits for the model, and the model never waits for a client: pieces of an answer pile up on the
loop's side, where max_tokens bounds them. A place in the queue is taken before a prompt is even tokenized, so that a
flood of large prompts costs one refusal each.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from appliance.engine.answer import Answerer, Finish, Piece, Sampling
from appliance.events import ERROR, event

RETRY_LIMIT_S = 60


class QueueFull(Exception):
    """No place is free; `retry_after_s` is a guess from how long answers took lately."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("the queue is full")
        self.retry_after_s = retry_after_s


class WorkerClosed(Exception):
    """The engine stopped before this answer was complete."""


class Worker:
    """Owns the thread, from `start` to `close`, which also ends every answer that is still being made."""

    def __init__(self, model: Answerer, *, queue_limit: int) -> None:
        """`queue_limit` counts the requests that wait while another is being answered."""
        self.queue_limit = queue_limit
        self._model = model
        self._changed = threading.Condition()
        self._places_taken = 0
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._closed = False
        self._typical_s = 1.0
        self._thread = threading.Thread(target=self._work, name="engine-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_answering(self) -> bool:
        return self._running is not None

    @property
    def queue_depth(self) -> int:
        """How many requests have a place and are not being answered yet."""
        with self._changed:
            return self._places_taken - (self._running is not None)

    @contextlib.contextmanager
    def place(self) -> Iterator["Place"]:
        """Give a place in the queue for as long as the context lasts; leaving it ends an answer that is incomplete.

        QueueFull if no place is free, WorkerClosed after `close`.
        """
        with self._changed:
            if self._closed:
                raise WorkerClosed
            if self._places_taken > self.queue_limit:
                raise QueueFull(self._retry_after_s())
            self._places_taken += 1
        place = Place(self)
        try:
            yield place
        finally:
            self._leave(place.job)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """End every answer with WorkerClosed and join the thread."""
        with self._changed:
            self._closed = True
            unanswered = list(self._waiting)
            self._waiting.clear()
            self._places_taken -= len(unanswered)
            if self._running is not None:
                self._running.cancelled.set()
            self._changed.notify_all()
        for job in unanswered:
            job.deliver(WorkerClosed())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            event(f"the model did not stop within {timeout_s:g} s; the process leaves it behind", priority=ERROR)

    def enqueue(self, job: "_Job") -> None:
        with self._changed:
            if self._closed:
                raise WorkerClosed
            self._waiting.append(job)
            self._changed.notify_all()

    def _leave(self, job: "_Job | None") -> None:
        with self._changed:
            if job is None:
                self._places_taken -= 1
            elif job in self._waiting:
                self._waiting.remove(job)
                self._places_taken -= 1
            else:
                # Running, and then its place is free only when the model has really let go; or long finished.
                job.cancelled.set()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            started = time.monotonic()
            outcome: Finish | BaseException
            try:
                outcome = self._model.generate(job.prompt_ids, job.sampling, emit=job.deliver, cancelled=job.cancelled)
            except Exception as error:
                outcome = error
            except BaseException as error:  # a stray exit in some library is no reason to leave the others unanswered
                outcome = RuntimeError(f"the model raised {error!r}")
            with self._changed:
                self._running = None
                self._places_taken -= 1
                self._typical_s += (time.monotonic() - started - self._typical_s) / 4
                closed = self._closed
            # After the place is free: a client that answers at once finds it so.
            job.deliver(WorkerClosed() if closed and isinstance(outcome, BaseException) else outcome)

    def _next(self) -> "_Job | None":
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _retry_after_s(self) -> int:
        return max(1, min(RETRY_LIMIT_S, math.ceil(self._typical_s * self._places_taken)))


class Place:
    """One request's place in the queue, from before its prompt is tokenized until its answer ends."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.job: _Job | None = None

    async def answer(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece | Finish, None]:
        """Yield the pieces of the answer as they come and its Finish last; raises what the model raised.

        WorkerClosed if the engine stops first. To be used once.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Piece | Finish | BaseException] = asyncio.Queue()

        def deliver(one: Piece | Finish | BaseException) -> None:
            # RuntimeError: the loop is closed, and there is nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, one)

        job = _Job(tuple(prompt_ids), sampling, deliver)
        self._worker.enqueue(job)
        self.job = job
        while True:
            one = await arrived.get()
            if isinstance(one, BaseException):
                raise one
            yield one
            if isinstance(one, Finish):
                return


class _Job:
    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        deliver: Callable[[Piece | Finish | BaseException], None],
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.deliver = deliver
        self.cancelled = threading.Event()
