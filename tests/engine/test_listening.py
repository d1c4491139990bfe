"""A server that stops answers whoever has connected: to a client a restart is a 503 or a refused connection."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest

from appliance.engine.generation import LanguageModel
from appliance.engine.listening import SILENCE_LIMIT_S
from appliance.engine.server import Server, make_app
from tests.descriptors import room_for
from tests.engine.serving import NAME, TIMEOUT_S

REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
Scenario = Callable[[Server, ExitStack], Awaitable[None]]


def run(model: LanguageModel, scenario: Scenario) -> None:
    async def life() -> None:
        server = Server(make_app(model, name=NAME))
        await server.start()
        with ExitStack() as connections:
            await scenario(server, connections)

    asyncio.run(life())


def connected(server: Server, connections: ExitStack) -> socket.socket:
    """Connect as the kernel does it for the server, which has not had its turn yet."""
    return connections.enter_context(socket.create_connection((server.host, server.port), TIMEOUT_S))


def everything_of(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.read()


def test_requests_that_the_kernel_has_queued_are_answered(language_model: LanguageModel) -> None:
    async def scenario(server: Server, connections: ExitStack) -> None:
        queued = [connected(server, connections) for _ in range(20)]
        for connection in queued:
            connection.sendall(REQUEST)
        await server.close()
        for connection in queued:
            answer = await asyncio.to_thread(everything_of, connection)
            assert answer.startswith(b"HTTP/1.1 503"), answer

    run(language_model, scenario)


def test_one_that_comes_just_before_the_stop_is_answered_at_every_turn_of_the_loop(
    language_model: LanguageModel,
) -> None:
    async def scenario(server: Server, connections: ExitStack) -> None:
        queued = []
        for _ in range(10):
            connection = connected(server, connections)
            connection.sendall(REQUEST)
            queued.append(connection)
            await asyncio.sleep(0)
        await server.close()
        for connection in queued:
            assert (await asyncio.to_thread(connection.recv, 12)).startswith(b"HTTP/1.1"), "no answer"

    run(language_model, scenario)


def test_who_has_connected_may_still_ask(language_model: LanguageModel) -> None:
    async def scenario(server: Server, connections: ExitStack) -> None:
        late = connected(server, connections)
        closing = asyncio.ensure_future(server.close())
        await asyncio.sleep(SILENCE_LIMIT_S / 4)
        assert not closing.done()
        late.sendall(REQUEST)
        await closing
        answer = await asyncio.to_thread(everything_of, late)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"Connection: close" in answer

    run(language_model, scenario)


def test_one_who_says_nothing_is_not_waited_for_long(language_model: LanguageModel) -> None:
    async def scenario(server: Server, connections: ExitStack) -> None:
        silent = connected(server, connections)
        await asyncio.wait_for(server.close(), SILENCE_LIMIT_S + TIMEOUT_S / 2)
        assert await asyncio.to_thread(everything_of, silent) == b""

    run(language_model, scenario)


def test_one_who_was_answered_before_is_not_waited_for(language_model: LanguageModel) -> None:
    async def scenario(server: Server, connections: ExitStack) -> None:
        idle = connected(server, connections)
        idle.sendall(REQUEST)
        assert (await asyncio.to_thread(idle.recv, 1 << 16)).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        await server.close()
        assert time.monotonic() - began < SILENCE_LIMIT_S

    run(language_model, scenario)


def test_one_without_a_descriptor_left_stops_all_the_same(language_model: LanguageModel) -> None:
    async def scenario(server: Server, connections: ExitStack) -> None:
        first, second = (connected(server, connections) for _ in range(2))
        for connection in (first, second):
            connection.sendall(REQUEST)
        with room_for(0):
            await asyncio.wait_for(server.close(), TIMEOUT_S)
        # The descriptor with which it listened is the one that is free now.
        assert (await asyncio.to_thread(everything_of, first)).startswith(b"HTTP/1.1 503")
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(everything_of, second)

    run(language_model, scenario)


def test_after_that_nobody_listens(language_model: LanguageModel) -> None:
    async def scenario(server: Server, connections: ExitStack) -> None:
        await server.close()
        with socket.socket() as probe:
            assert probe.connect_ex((server.host, server.port)) != 0

    run(language_model, scenario)
