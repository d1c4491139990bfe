"""Ports that nobody listens on."""

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a port of the loopback that nobody listens on now; somebody may in the next moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
