"""The engine's HTTP routes: OpenAI's API, health and metrics.

Whatever happens, a client gets an answer in OpenAI's shape, and no client can make another one wait for anything but
the model itself.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from prometheus_client.registry import Collector

from appliance.engine.answer import Finish, Piece
from appliance.engine.api import ChatRequest, CompletionRequest, Request, parse
from appliance.engine.metrics import CONTENT_TYPE, Metrics
from appliance.engine.prompts import Prompts
from appliance.engine.refusal import Refusal
from appliance.engine.reply import ChatReply, CompletionReply, Reply, event_bytes
from appliance.engine.worker import Place, QueueFull, Worker, WorkerClosed

if TYPE_CHECKING:
    from appliance.engine.generation import LanguageModel

CLIENT_LEFT = 499
DRAIN_RETRY_AFTER_S = 5
log = logging.getLogger(__name__)
R = TypeVar("R", bound=Request)


class Routes:
    """Answers requests for one model until it is told to drain."""

    def __init__(
        self,
        model: "LanguageModel",
        *,
        name: str,
        queue_limit: int,
        body_limit_bytes: int,
        read_timeout_s: float,
        write_timeout_s: float,
        health: Callable[[], Mapping[str, object]],
        collectors: Iterable[Collector],
    ) -> None:
        self._name = name
        self._context_tokens = model.context_tokens
        self._body_limit_bytes = body_limit_bytes
        self._read_timeout_s = read_timeout_s
        self._write_timeout_s = write_timeout_s
        self._health = health
        self._created = int(time.time())
        self._worker = Worker(model, queue_limit=queue_limit)
        self._prompts = Prompts(model)
        # One thread: encoding a long prompt must not hold up the loop, and several at once would only share a core.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="engine-encoder")
        self._metrics = Metrics(
            queue_depth=lambda: self._worker.queue_depth,
            running=lambda: self._worker.is_answering,
            collectors=collectors,
        )
        self._answering: set[asyncio.Task[Any]] = set()
        self._draining = False

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
        ]

    def start(self) -> None:
        self._worker.start()

    async def drain(self, *, limit_s: float) -> bool:
        """Refuse new requests from now on; return whether those under way were all answered within the limit."""
        self._draining = True
        if not self._answering:
            return True
        _, unanswered = await asyncio.wait(self._answering, timeout=limit_s)
        return not unanswered

    async def close(self) -> None:
        """End what is under way and the threads; what it was doing is told to the clients."""
        self._draining = True
        await asyncio.to_thread(self._worker.close)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        self._refuse_other_models(request.match_info["model"])
        return _json(self._model_card())

    @property
    def is_working(self) -> bool:
        """Whether answers can still be made: what a watchdog has to know."""
        return self._worker.is_alive

    async def health(self, _: web.Request) -> web.Response:
        state = "draining" if self._draining else "ok" if self._worker.is_alive else "failed"
        queue = {"waiting": self._worker.queue_depth, "limit": self._worker.queue_limit}
        own = {"status": state, "model": self._name, "queue": queue, "answering": self._worker.is_answering}
        return _json(dict(self._health()) | own, status=200 if state == "ok" else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionRequest, CompletionReply, encode=self._prompts.of_completion)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatRequest, ChatReply, encode=self._prompts.of_chat)

    @web.middleware
    async def guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Give every failure OpenAI's shape, and count every request."""
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        try:
            response = await handler(request)
        except (asyncio.CancelledError, ConnectionError):
            self._metrics.count_request(route, CLIENT_LEFT)
            raise
        except Refusal as refusal:
            response = _refused(refusal)
        except web.HTTPException as error:
            response = _refused(self._refusal_of(error, request))
        except Exception:
            log.exception("%s %s failed", request.method, route)
            response = _refused(Refusal(500, "the engine failed; its log says how"))
        self._metrics.count_request(route, response.status)
        return response

    async def _answer(
        self, request: web.Request, schema: type[R], kind: type[Reply], *, encode: Callable[[R], list[int]]
    ) -> web.StreamResponse:
        arrived = time.monotonic()
        self._refuse_while_draining()
        asked = parse(await self._body(request), schema)
        self._refuse_other_models(asked.model)
        self._refuse_while_draining()
        with self._under_way(), self._place() as place:
            prompt_ids = await asyncio.get_running_loop().run_in_executor(self._encoder, encode, asked)
            sampling = self._prompts.sampling(asked, len(prompt_ids))
            self._metrics.count_prompt(len(prompt_ids))
            with_ids = bool(asked.return_token_ids)
            reply = kind(self._name, prompt_ids, with_usage=asked.includes_usage, with_ids=with_ids)
            async with contextlib.aclosing(self._counted(place.answer(prompt_ids, sampling), arrived)) as pieces:
                if asked.stream:
                    return await self._stream(request, reply, pieces, with_ids=with_ids)
                return await _whole(reply, pieces)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        """Let `drain` wait for this request, its last byte included."""
        task = asyncio.current_task()
        if task is not None:
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        yield

    @contextlib.contextmanager
    def _place(self) -> Iterator[Place]:
        try:
            with self._worker.place() as place:
                yield place
        except QueueFull as full:
            raise Refusal(
                429,
                "too many requests are waiting for this model; try again later",
                code="queue_full",
                headers={"Retry-After": str(full.retry_after_s)},
            ) from full
        except WorkerClosed as closed:
            raise _stopping() from closed

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            # A web page can make a browser post anything else to this port without asking.
            raise Refusal(415, "Content-Type: application/json is expected")
        if request.content_length is not None and request.content_length > self._body_limit_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await request.read()
        except TimeoutError as error:
            raise Refusal(408, f"the body did not arrive within {self._read_timeout_s:g} s") from error
        except web.RequestPayloadError as error:
            raise Refusal(400, "the body cannot be decoded") from error

    async def _counted(
        self, pieces: AsyncGenerator[Piece | Finish, None], arrived: float
    ) -> AsyncGenerator[Piece | Finish, None]:
        is_first = True
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Piece):
                    self._metrics.count_completion(len(piece.token_ids))
                    if is_first:
                        self._metrics.observe_first_token(time.monotonic() - arrived)
                        is_first = False
                yield piece

    async def _stream(
        self, request: web.Request, reply: Reply, pieces: AsyncGenerator[Piece | Finish, None], *, with_ids: bool
    ) -> web.StreamResponse:
        # Nothing is sent before the first token: until then a failure still has its own HTTP status.
        piece = await anext(pieces)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                "X-Request-Id": reply.id,
            }
        )
        await response.prepare(request)
        try:
            await self._write(request, response, *reply.first_chunks())
            while isinstance(piece, Piece):
                if piece.text or with_ids:
                    await self._write(request, response, reply.chunk(piece.text, piece.token_ids))
                piece = await anext(pieces)
            await self._write(request, response, *reply.last_chunks(piece), "[DONE]")
        except WorkerClosed:
            await self._write(request, response, _stopping().body())
        except ConnectionError:
            raise
        except Exception:
            log.exception("a stream failed")
            await self._write(request, response, Refusal(500, "the engine failed; its log says how").body())
        await response.write_eof()
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, *events: dict[str, Any] | str) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                for event in events:
                    await response.write(event_bytes(event))
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read") from error

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "appliance",
            "max_model_len": self._context_tokens,
        }

    def _refuse_other_models(self, name: str) -> None:
        if name != self._name:
            shown = name[:100]
            raise Refusal(
                404, f"the model {shown!r} is not served here; {self._name!r} is", param="model", code="model_not_found"
            )

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise _stopping()

    def _refusal_of(self, error: web.HTTPException, request: web.Request) -> Refusal:
        if error.status == 404:
            return Refusal(404, f"there is no {request.method} {request.path[:100]}", code="unknown_url")
        if error.status == 405:
            allowed = error.headers.get("Allow", "")
            return Refusal(
                405, f"{request.path[:100]} answers {allowed}", code="method_not_allowed", headers={"Allow": allowed}
            )
        return self._too_large() if error.status == 413 else Refusal(error.status, error.reason)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._body_limit_bytes} bytes", code="request_too_large")


async def _whole(reply: Reply, pieces: AsyncGenerator[Piece | Finish, None]) -> web.Response:
    texts: list[str] = []
    ids: list[int] = []
    async for piece in pieces:
        if isinstance(piece, Finish):
            return _json(reply.whole("".join(texts), ids, piece), headers={"X-Request-Id": reply.id})
        texts.append(piece.text)
        ids.extend(piece.token_ids)
    raise AssertionError("an answer ends with its Finish")


def _refused(refusal: Refusal) -> web.Response:
    response = web.Response(
        status=refusal.status, body=refusal.body_bytes(), content_type="application/json", headers=refusal.headers
    )
    if refusal.status in (408, 413):
        # The rest of the body is still on its way, and nobody wants it.
        response.force_close()
    return response


def _stopping() -> Refusal:
    return Refusal(503, "the engine is stopping", code="stopping", headers={"Retry-After": str(DRAIN_RETRY_AFTER_S)})


def _json(data: dict[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = json.dumps(data, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")
    return web.Response(status=status, body=body, content_type="application/json", charset="utf-8", headers=headers)
