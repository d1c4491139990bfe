"""The queue from outside, clients that leave, and an engine that finishes what it began before it goes."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import openai
import pytest

from appliance.engine.generation import LanguageModel
from appliance.engine.server import Server, make_app, serve
from appliance.errors import HostError, ResourceError
from tests.engine.serving import NAME, TIMEOUT_S, Held, Reply, Served, serving

ASKED: dict[str, Any] = {"model": NAME, "prompt": "hello", "max_tokens": 8, "temperature": 0}
POST = "/v1/completions"
MANY = 10_000
STREAM = {"stream": True, "return_token_ids": True}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_a_full_queue_is_429_with_retry_after_and_the_others_are_answered(held: Held, pool: ThreadPoolExecutor) -> None:
    with serving(held, queue_limit=2) as served, freed(held):
        first = pool.submit(served.ask, "POST", POST, ASKED)
        held.wait_until_begun()
        waiting = [pool.submit(served.ask, "POST", POST, ASKED) for _ in range(2)]
        until(lambda: served.ask("GET", "/health").json["queue"]["waiting"] == 2)
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0)
        with client, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**ASKED)
        assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 60
        assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")
        assert served.metric("appliance_engine_queue_depth") == 2
        held.allow(MANY)
        assert [one.result(TIMEOUT_S).status for one in (first, *waiting)] == [200] * 3
        assert served.ask("POST", POST, ASKED).status == 200


def test_the_openai_client_comes_back_by_itself_after_a_429(held: Held, pool: ThreadPoolExecutor) -> None:
    with serving(held, queue_limit=0) as served, freed(held):
        first = pool.submit(served.ask, "POST", POST, ASKED)
        held.wait_until_begun()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=5) as client:
            second = pool.submit(lambda: client.completions.create(**ASKED))
            until(lambda: counted(served, status=429) >= 1)
            held.allow(MANY)
            assert second.result(TIMEOUT_S).choices[0].text
        assert first.result(TIMEOUT_S).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_model_for_the_next(held: Held, pool: ThreadPoolExecutor, stream: bool) -> None:
    with serving(held) as served, freed(held):
        with open_request(served, ASKED | {"max_tokens": 400, "stream": stream}) as connection:
            held.wait_until_begun()
            if stream:
                held.allow(3)
                assert connection.getresponse().readline().startswith(b"data: ")
            second = pool.submit(served.ask, "POST", POST, ASKED)
            until(lambda: served.ask("GET", "/health").json["queue"]["waiting"] == 1)
        held.wait_until_ended()  # nothing more was allowed: it ended because it was cancelled
        held.wait_until_begun()
        held.allow(MANY)
        assert second.result(TIMEOUT_S).status == 200
        assert counted(served, status=499) == 1


def test_a_client_that_leaves_the_queue_is_never_answered(held: Held, pool: ThreadPoolExecutor) -> None:
    with serving(held, queue_limit=1) as served, freed(held):
        first = pool.submit(served.ask, "POST", POST, ASKED)
        held.wait_until_begun()
        with open_request(served, ASKED):
            until(lambda: served.ask("GET", "/health").json["queue"]["waiting"] == 1)
        until(lambda: served.ask("GET", "/health").json["queue"]["waiting"] == 0)
        held.allow(MANY)
        assert first.result(TIMEOUT_S).status == 200
        assert not held.begun.acquire(blocking=False)


def test_a_client_that_reads_nothing_is_dropped_and_holds_up_nobody(language_model: LanguageModel) -> None:
    name = "x" * 20_000  # it is in every chunk, and 8 MB are more than the kernel's buffers take
    body = json.dumps({"model": name, "prompt": "The weights stay while", "max_tokens": 400, "temperature": 0} | STREAM)
    head = f"POST {POST} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(language_model, write_timeout_s=0.2, name=name) as served, closing(socket.socket()) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        peer.connect(("127.0.0.1", served.port))
        peer.sendall(f"{head}{body}".encode())
        assert served.ask("POST", POST, ASKED | {"model": name}).status == 200
        until(lambda: counted(served, status=499) == 1)


def test_draining_refuses_new_requests_and_finishes_the_old(held: Held, pool: ThreadPoolExecutor) -> None:
    with serving(held) as served, freed(held):
        streaming, waiting = (pool.submit(served.ask, "POST", POST, ASKED | {"stream": on}) for on in (True, False))
        held.wait_until_begun()
        until(lambda: served.ask("GET", "/health").json["queue"]["waiting"] == 1)
        wait = served.start_draining(limit_s=TIMEOUT_S)
        until(lambda: served.ask("GET", "/health").status == 503)
        assert served.ask("GET", "/health").json["status"] == "draining"
        refused = served.ask("POST", POST, ASKED)
        assert (refused.status, refused.json["error"]["code"]) == (503, "stopping")
        assert int(refused.headers["Retry-After"]) >= 1
        assert served.ask("GET", "/v1/models").status == 200
        held.allow(MANY)
        assert wait()
        assert streaming.result(TIMEOUT_S).body.endswith(b"data: [DONE]\n\n")
        assert waiting.result(TIMEOUT_S).json["usage"]["completion_tokens"] == 8


def test_a_drain_without_requests_is_over_at_once(language_model: LanguageModel) -> None:
    with serving(language_model) as served:
        assert served.start_draining(limit_s=TIMEOUT_S)()


def test_what_a_drain_does_not_finish_in_time_is_told(held: Held, pool: ThreadPoolExecutor) -> None:
    with freed(held):
        with serving(held) as served:
            streaming = pool.submit(served.ask, "POST", POST, ASKED | {"stream": True, "return_token_ids": True})
            held.wait_until_begun()
            held.allow(2)
            whole = pool.submit(served.ask, "POST", POST, ASKED)
            until(lambda: served.ask("GET", "/health").json["queue"]["waiting"] == 1)
            until(lambda: served.metric("appliance_engine_completion_tokens_total") == 2)
            assert not served.start_draining(limit_s=0.05)()
        *said, told, end = streaming.result(TIMEOUT_S).body.split(b"\n\n")
        assert (len(said), end) == (2, b"")
        assert json.loads(told.removeprefix(b"data: "))["error"]["code"] == "stopping"
        assert (whole.result(TIMEOUT_S).status, whole.result().json["error"]["code"]) == (503, "stopping")


def test_sigterm_drains_and_the_server_returns(held: Held, pool: ThreadPoolExecutor) -> None:
    asked: list[Future[Reply]] = []

    def started(host: str, port: int) -> None:
        def client() -> Reply:
            with closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
                connection.request("POST", POST, json.dumps(ASKED), {"Content-Type": "application/json"})
                held.wait_until_begun()
                os.kill(os.getpid(), signal.SIGTERM)
                until(lambda: status(host, port) == 503)
                held.allow(MANY)
                response = connection.getresponse()
                return Reply(response.status, {}, response.read())

        asked.append(pool.submit(client))

    with freed(held):
        before = signal.getsignal(signal.SIGTERM)
        asyncio.run(serve(make_app(held, name=NAME), started=started, drain_limit_s=TIMEOUT_S))
        assert asked[0].result(TIMEOUT_S).json["usage"]["completion_tokens"] == 8
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_ends_the_wait(held: Held, pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[Future[int]] = []

    def started(host: str, port: int) -> None:
        def client() -> int:
            with closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
                connection.request("POST", POST, json.dumps(ASKED), {"Content-Type": "application/json"})
                held.wait_until_begun()
                os.kill(os.getpid(), signal.SIGINT)
                until(lambda: status(host, port) == 503)
                os.kill(os.getpid(), signal.SIGTERM)
                return connection.getresponse().status

        asked.append(pool.submit(client))

    with freed(held):
        asyncio.run(serve(make_app(held, name=NAME), started=started, drain_limit_s=3600.0))
        assert asked[0].result(TIMEOUT_S) == 503
    assert "before every answer is complete" in capfd.readouterr().err


def test_a_socket_that_listens_already_is_used(language_model: LanguageModel) -> None:
    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        server = Server(make_app(language_model, name=NAME), listener=listener)
        await server.start()
        try:
            assert server.port == listener.getsockname()[1]
            assert await asyncio.to_thread(status, "127.0.0.1", server.port) == 200
        finally:
            await server.close()

    asyncio.run(scenario())


def test_a_unix_socket_that_listens_already_is_used(language_model: LanguageModel, tmp_path: Any) -> None:
    async def scenario() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        server = Server(make_app(language_model, name=NAME), listener=listener)
        await server.start()
        try:
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
            writer.close()
        finally:
            await server.close()

    asyncio.run(scenario())


def test_a_port_that_is_taken_is_refused_by_number(language_model: LanguageModel) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"127.0.0.1:{port} is in use"):
            asyncio.run(serve(make_app(language_model, name=NAME), port=port))


def test_an_address_of_another_machine_is_refused(language_model: LanguageModel) -> None:
    with pytest.raises(HostError, match=r"cannot listen on 192\.0\.2\.1:0"):
        asyncio.run(serve(make_app(language_model, name=NAME), host="192.0.2.1"))


def test_it_listens_for_this_machine_only_unless_told_otherwise(served: Served) -> None:
    listening = socket.create_connection(("127.0.0.1", served.port))
    assert listening.getpeername()[0] == "127.0.0.1"
    listening.close()
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, served.port), timeout=2)


@contextmanager
def freed(held: Held) -> Iterator[None]:
    """Forget what an earlier test allowed or saw, and leave nothing held."""
    for semaphore in (held.allowed, held.begun, held.ended):
        while semaphore.acquire(blocking=False):
            pass
    try:
        yield
    finally:
        held.allow(MANY)


@contextmanager
def open_request(served: Served, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """Send a request and leave before its answer is complete."""
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", POST, json.dumps(body), {"Content-Type": "application/json"})
        yield connection


def status(host: str, port: int) -> int:
    with closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status


def counted(served: Served, *, status: int) -> float:
    with contextlib.suppress(AssertionError):
        return served.metric(f'appliance_engine_requests_total{{route="/v1/completions",status="{status}"}}')
    return 0.0


def until(condition: Callable[[], bool]) -> None:
    """Ask again until it is so: what the server knows is only to be had by asking."""
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    pytest.fail("it never came true")
