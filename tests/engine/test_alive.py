import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from appliance.engine.alive import is_alive


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
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "alive"),
    [
        (200, b'{"status": "ok"}', True),
        (503, b'{"status": "draining"}', True),
        (503, b'{"status": "failed"}', False),
        (200, b"", False),
        (200, b"[]", False),
        (404, b"{}", False),
    ],
)
def test_an_engine_is_alive_while_it_answers_or_drains(engine: Engine, status: int, body: bytes, alive: bool) -> None:
    engine.answer = status, body
    assert is_alive(engine.url) is alive


def test_one_that_is_not_there_is_not_alive(engine: Engine) -> None:
    url = engine.url
    engine.shutdown()
    engine.server_close()
    assert not is_alive(url)
