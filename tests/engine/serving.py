"""Runs the real server on a loop of its own thread, and a real model that speaks only when a test lets it."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from appliance.engine.answer import Cancelled, Finish, Piece, Sampling
from appliance.engine.configs import load_sampling_defaults
from appliance.engine.generation import LanguageModel
from appliance.engine.model import load
from appliance.engine.server import Server, make_app
from appliance.engine.tokenizer import load_tokenizer
from tests.engine.checkpoints import read_tensors

NAME = "tiny/model"
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Served:
    """A server that listens; `loop` is where it runs."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self.port = server.port
        self.url = f"http://127.0.0.1:{server.port}"

    def ask(self, method: str, path: str, body: bytes | dict[str, Any] | None = None, **headers: str) -> Reply:
        """Send one request, of which a dict is JSON, and return all of the reply."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)) as connection:
            sent = {"Content-Type": "application/json"} | {
                name.replace("_", "-"): value for name, value in headers.items()
            }
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())

    def metric(self, name: str) -> float:
        """Return the value of one line of /metrics."""
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def start_draining(self, *, limit_s: float) -> Callable[[], bool]:
        """Begin to drain and return a function that waits for its end."""
        future = asyncio.run_coroutine_threadsafe(self._server.drain(limit_s=limit_s), self._loop)
        return lambda: future.result(TIMEOUT_S)


@contextmanager
def serving(model: LanguageModel, *, name: str = NAME, **options: Any) -> Iterator[Served]:
    """Serve a model until the context ends, and see to it that nothing of the loop is left then."""
    app = make_app(model, name=name, **options)
    loop = asyncio.new_event_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    started: list[Served] = []
    ready, stop = threading.Event(), asyncio.Event()
    thread = threading.Thread(target=_run, args=(loop, app, started, ready, stop), name="test-server")
    thread.start()
    assert ready.wait(TIMEOUT_S)
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert not failures, failures


class Held(LanguageModel):
    """A real model that says each piece only when `allow` lets it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allowed = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        emit: Callable[[Piece], None],
        cancelled: threading.Event,
    ) -> Finish:
        def when_allowed(piece: Piece) -> None:
            while not self.allowed.acquire(timeout=0.01):
                if cancelled.is_set():
                    raise Cancelled
            emit(piece)

        self.begun.release()
        try:
            return super().generate(prompt_ids, sampling, emit=when_allowed, cancelled=cancelled)
        finally:
            self.ended.release()

    def allow(self, count: int) -> None:
        self.allowed.release(count)

    def wait_until_begun(self) -> None:
        assert self.begun.acquire(timeout=TIMEOUT_S)

    def wait_until_ended(self) -> None:
        assert self.ended.acquire(timeout=TIMEOUT_S)


def held_model(checkpoint: Path) -> Held:
    module = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    return Held(module, load_tokenizer(checkpoint), defaults=load_sampling_defaults(checkpoint))


def _run(
    loop: asyncio.AbstractEventLoop,
    app: web.Application,
    started: list[Served],
    ready: threading.Event,
    stop: asyncio.Event,
) -> None:
    async def life() -> None:
        server = Server(app)
        await server.start()
        started.append(Served(server, loop))
        ready.set()
        await stop.wait()
        await server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(life())
