"""The server below the client: every failure in OpenAI's shape, and no client that can hold up another."""

import gzip
import http.client
import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from appliance.engine.generation import LanguageModel
from tests.engine.serving import NAME, TIMEOUT_S, Reply, Served, serving

SHORT: dict[str, Any] = {"model": NAME, "prompt": "hello", "max_tokens": 3, "temperature": 0}
POST = "/v1/completions"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/../etc/passwd", 404, "unknown_url"),
        ("GET", "/%00", 404, "unknown_url"),
        ("GET", POST, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("OPTIONS", POST, 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_a_wrong_address_or_method_is_told_in_openais_shape(
    served: Served, method: str, path: str, status: int, code: str
) -> None:
    reply = served.ask(method, path)
    assert (reply.status, error(reply)["code"]) == (status, code)
    if status == 405:
        assert reply.headers["Allow"]


@pytest.mark.parametrize("body", [b"", b"{", b"\x00\xff" * 50, b"[" * 10_000, b"null"])
def test_garbage_is_told_in_openais_shape(served: Served, body: bytes) -> None:
    reply = served.ask("POST", POST, body)
    assert (reply.status, error(reply)["type"]) == (400, "invalid_request_error")
    assert served.ask("POST", POST, SHORT).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/octet-stream"])
def test_a_body_that_a_web_page_could_send_unasked_is_refused(served: Served, kind: str) -> None:
    reply = served.ask("POST", POST, json.dumps(SHORT).encode(), Content_Type=kind)
    assert reply.status == 415
    assert "application/json" in error(reply)["message"]


@pytest.mark.parametrize("path", [POST, "/v1/chat/completions"])
def test_a_body_of_ten_megabytes_is_refused_and_costs_nobody_else(served: Served, path: str) -> None:
    huge = json.dumps({"model": NAME, "prompt": "x" * 10_000_000}).encode()
    reply = served.ask("POST", path, huge)
    assert (reply.status, error(reply)["code"]) == (413, "request_too_large")
    assert served.ask("POST", POST, SHORT).status == 200


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_arrives(served: Served) -> None:
    with connected(served) as peer:
        head = f"POST {POST} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {1 << 40}\r\n\r\n"
        peer.sendall(head.encode())
        assert received(peer).startswith(b"HTTP/1.1 413 ")


def test_a_large_body_without_a_length_is_refused_once_it_is_too_large(language_model: LanguageModel) -> None:
    with serving(language_model, body_limit_bytes=10_000) as served:
        with connected(served) as peer:
            head = f"POST {POST} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            peer.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            peer.sendall(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
            assert received(peer).startswith(b"HTTP/1.1 413 ")
        assert served.ask("POST", POST, SHORT).status == 200


def test_a_body_that_inflates_is_measured_by_what_it_becomes(language_model: LanguageModel) -> None:
    with serving(language_model, body_limit_bytes=100_000) as served:
        bomb = gzip.compress(b" " * 50_000_000)
        assert len(bomb) < 100_000
        assert served.ask("POST", POST, bomb, Content_Encoding="gzip").status == 413
        small = gzip.compress(json.dumps(SHORT).encode())
        assert served.ask("POST", POST, small, Content_Encoding="gzip").status == 200
        assert served.ask("POST", POST, b"not gzip", Content_Encoding="gzip").status == 400


def test_a_body_that_never_ends_is_given_up(language_model: LanguageModel) -> None:
    with serving(language_model, read_timeout_s=0.2) as served, connected(served) as peer:
        head = f"POST {POST} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
        peer.sendall(head.encode() + b"{")
        assert served.ask("POST", POST, SHORT).status == 200
        assert received(peer).startswith(b"HTTP/1.1 408 ")


def test_silent_and_half_open_connections_hold_up_nobody(served: Served) -> None:
    with ExitStack() as opened:
        for beginning in (b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"\x16\x03\x01\x02\x00"):
            for _ in range(50):
                peer = opened.enter_context(connected(served))
                peer.sendall(beginning)
        for _ in range(3):
            assert served.ask("POST", POST, SHORT).status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    ],
    ids=range(7),
)
def test_what_is_not_http_is_refused_and_fills_no_log(
    served: Served, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(served) as peer:
        peer.sendall(request_bytes)
        assert received(peer).startswith(b"HTTP/1.")
    assert served.ask("POST", POST, SHORT).status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_long_prompt_leaves_the_server_answering_while_it_is_encoded(language_model: LanguageModel) -> None:
    with serving(language_model) as served:
        body = json.dumps(SHORT | {"prompt": "the weights stay. " * 50_000}).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT_S)) as slow:
            slow.request("POST", POST, body, {"Content-Type": "application/json"})
            while served.ask("GET", "/health").json["queue"]["waiting"] == 0:
                pass  # it is still being received
            reply = slow.getresponse()
            assert reply.status == 400
            assert json.load(reply)["error"]["code"] == "context_length_exceeded"


def test_health_says_what_the_engine_adds_to_it(language_model: LanguageModel) -> None:
    with serving(language_model, health=lambda: {"verdict": "hit", "path": Path("/x")}, queue_limit=7) as served:
        reply = served.ask("GET", "/health")
        assert reply.status == 200
        assert reply.json == {
            "verdict": "hit",
            "path": "/x",
            "status": "ok",
            "model": NAME,
            "queue": {"waiting": 0, "limit": 7},
            "answering": False,
        }
        assert served.ask("HEAD", "/health").status == 200


def test_metrics_count_requests_by_outcome_and_tokens_both_ways(language_model: LanguageModel) -> None:
    others = CollectorRegistry()
    Gauge("appliance_other", "Of another part.", registry=others).set(5)
    with serving(language_model, collectors=[others]) as served:
        served.ask("POST", POST, SHORT)
        served.ask("POST", POST, SHORT | {"stream": True})
        served.ask("POST", POST, b"{")
        for path in ("/a", "/b", "/c" * 100):
            served.ask("GET", path)
        assert served.metric('appliance_engine_requests_total{route="/v1/completions",status="200"}') == 2
        assert served.metric('appliance_engine_requests_total{route="/v1/completions",status="400"}') == 1
        assert served.metric('appliance_engine_requests_total{route="other",status="404"}') == 3
        assert served.metric("appliance_engine_prompt_tokens_total") == 2 * len(
            language_model.tokenizer.encode("hello")
        )
        assert served.metric("appliance_engine_completion_tokens_total") == 6
        assert served.metric("appliance_engine_first_token_seconds_count") == 2
        assert served.metric("appliance_engine_queue_depth") == 0
        assert served.metric("appliance_engine_requests_running") == 0
        assert served.metric("appliance_other") == 5
        assert served.ask("GET", "/metrics").headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_two_servers_in_one_process_count_apart(language_model: LanguageModel) -> None:
    with serving(language_model) as first, serving(language_model, name="second") as second:
        first.ask("POST", POST, SHORT)
        assert first.metric("appliance_engine_completion_tokens_total") == 3
        assert second.metric("appliance_engine_completion_tokens_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_a_500_that_tells_nothing_and_a_traceback_in_the_log(
    served: Served, language_model: LanguageModel, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    with broken(language_model, after_pieces=0):
        reply = served.ask("POST", POST, SHORT | {"stream": stream})
    assert (reply.status, error(reply)["type"]) == (500, "server_error")
    assert "secret" not in reply.body.decode()
    assert "secret detail" in caplog.text
    assert served.ask("POST", POST, SHORT).status == 200


def test_a_stream_that_breaks_says_so_and_does_not_pretend_to_be_complete(
    served: Served, language_model: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    with broken(language_model, after_pieces=2):
        events = (
            served.ask("POST", POST, SHORT | {"stream": True, "return_token_ids": True}).body.decode().split("\n\n")
        )
    assert [("text_completion" in event) for event in events] == [True, True, False, False]
    assert json.loads(events[2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert events[3] == ""
    assert "secret detail" in caplog.text


def error(reply: Reply) -> dict[str, Any]:
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.json.keys() == {"error"}
    assert reply.json["error"].keys() == {"message", "type", "param", "code"}
    said: dict[str, Any] = reply.json["error"]
    return said


@contextmanager
def broken(model: LanguageModel, *, after_pieces: int) -> Iterator[None]:
    """Let the model fail as a bug would."""
    real = model.generate

    def fails(*args: Any, emit: Callable[[Any], None], **options: Any) -> Any:
        said: list[Any] = []

        def counted(piece: Any) -> None:
            if len(said) == after_pieces:
                raise ZeroDivisionError("secret detail")
            said.append(piece)
            emit(piece)

        return real(*args, emit=counted, **options)

    model.generate = fails  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.generate


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S)) as peer:
        yield peer


def received(peer: socket.socket) -> bytes:
    """Return what the server says first."""
    return peer.recv(65536)
