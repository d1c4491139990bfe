"""The engine's server: listens, answers, and on SIGTERM finishes what it began before it goes.

While it drains, /health and new requests get 503 and the listening socket stays open, so that a balancer in front sees
why. A second signal ends the wait.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import HttpProcessingError
from prometheus_client.registry import Collector

from appliance.engine.listening import Listening
from appliance.engine.routes import Routes
from appliance.errors import ApplianceError
from appliance.events import WARNING, event

if TYPE_CHECKING:
    from appliance.engine.generation import LanguageModel

ROUTES = web.AppKey("routes", Routes)
KEEPALIVE_TIMEOUT_S = 75.0
CLOSE_TIMEOUT_S = 5.0


def make_app(
    model: "LanguageModel",
    *,
    name: str,
    queue_limit: int = 32,
    body_limit_bytes: int = 2 << 20,
    read_timeout_s: float = 30.0,
    write_timeout_s: float = 60.0,
    health: Callable[[], Mapping[str, object]] = dict,
    collectors: Iterable[Collector] = (),
) -> web.Application:
    """Return the application that serves `model` as `name`; the caller runs it, with `serve` or with a `Server`.

    `health` adds fields to /health's body, `collectors` (a registry is one) add metrics to /metrics. At most
    `queue_limit` requests wait while one is answered; a body must arrive within `read_timeout_s`, and a client that
    takes nothing of a stream for `write_timeout_s` is dropped.
    """
    routes = Routes(
        model,
        name=name,
        queue_limit=queue_limit,
        body_limit_bytes=body_limit_bytes,
        read_timeout_s=read_timeout_s,
        write_timeout_s=write_timeout_s,
        health=health,
        collectors=collectors,
    )
    app = web.Application(middlewares=[routes.guard], client_max_size=body_limit_bytes)
    app[ROUTES] = routes
    app.add_routes(routes.table())

    async def life(_: web.Application) -> AsyncIterator[None]:
        routes.start()
        yield
        await routes.close()

    app.cleanup_ctx.append(life)
    return app


async def serve(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    listener: socket.socket | None = None,
    drain_limit_s: float = 30.0,
    started: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. `started` is told where it listens. Main thread only.

    `listener`, if given, is a bound and listening socket, and host and port are not used. ResourceError if the port is
    taken, HostError if the address cannot be listened on for another reason.
    """
    server = Server(app, host=host, port=port, listener=listener)
    await server.start()
    try:
        with _signals() as (first, second):
            started(server.host, server.port)
            await first.wait()
            drained = asyncio.ensure_future(server.drain(limit_s=drain_limit_s))
            impatient = asyncio.ensure_future(second.wait())
            await asyncio.wait({drained, impatient}, return_when=asyncio.FIRST_COMPLETED)
            impatient.cancel()
            if not drained.done() or not drained.result():
                drained.cancel()
                event("the engine stops before every answer is complete", priority=WARNING)
    finally:
        await server.close()


class Server:
    """Owns the listening socket of an application, from `start` to `close`."""

    def __init__(
        self,
        app: web.Application,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self._app = app
        self._listener = listener
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log(),
            # A client that leaves takes its handler with it, and that ends the answer.
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            shutdown_timeout=CLOSE_TIMEOUT_S,
        )
        self._listening = Listening(app, self._runner)

    async def start(self) -> None:
        """Listen; the errors of `Listening.start`."""
        await self._runner.setup()
        try:
            self.host, self.port = await self._listening.start(self.host, self.port, self._listener)
        except ApplianceError:
            await self._runner.cleanup()
            raise

    async def drain(self, *, limit_s: float) -> bool:
        """Refuse new requests; return whether those under way were all answered within the limit."""
        return await self._app[ROUTES].drain(limit_s=limit_s)

    async def close(self) -> None:
        """Tell whoever still waits that the engine stops, and close everything."""
        await self._app[ROUTES].close()
        await self._listening.stop()
        await self._runner.cleanup()


def _http_log() -> logging.Logger:
    """What aiohttp has to say, but for a traceback whenever some client does not speak HTTP."""

    def is_ours(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)

    log = logging.getLogger(f"{__name__}.http")
    log.filters = [is_ours]
    return log


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Set the first event at the first SIGTERM or SIGINT, the second at the next."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def arrived() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, arrived)
    try:
        yield first, second
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
