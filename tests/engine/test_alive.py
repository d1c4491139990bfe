import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from appliance.engine import alive
from appliance.engine.alive import is_alive

# How often a server looks whether it shall end.
POLL_S = 0.01


class Engine(HTTPServer):
    """Answers every request with the same status and body."""

    answer: tuple[int, bytes] = (200, b"")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/health"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Engine)
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[POLL_S])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "lives"),
    [
        (200, b'{"status": "ok"}', True),
        (503, b'{"status": "draining"}', True),
        (503, b'{"status": "failed"}', False),
        (200, b"", True),  # vLLM's
        (503, b"", False),
        (503, b"[]", False),
        (404, b"{}", False),
    ],
)
def test_an_engine_is_alive_while_it_answers_or_drains(engine: Engine, status: int, body: bytes, lives: bool) -> None:
    engine.answer = status, body
    assert is_alive(engine.url) is lives


def test_one_that_does_not_listen_yet_is_left_in_peace(engine: Engine) -> None:
    url = engine.url
    engine.shutdown()
    engine.server_close()
    assert is_alive(url)


def test_one_that_does_not_answer_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not is_alive(f"http://127.0.0.1:{silent.getsockname()[1]}/health")
