"""What a health probe does."""

import socket
import urllib.error
import urllib.request


def free_port() -> int:
    """Return a port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def got(url: str) -> tuple[int, str, str]:
    """Return status, content type and body."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()
