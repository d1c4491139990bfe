import asyncio
import os
import signal
import unicodedata
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.up.process import STDERR, STDOUT, Process
from tests.up.stage import TIMEOUT_S, ends, puppet, until, until_file


def run_to_end(*steps: str, argv: tuple[str, ...] | None = None, **settings: Any) -> tuple[list[tuple[str, str]], Any]:
    """Return the lines of a process, and what `end` returned after it had ended by itself."""
    lines: list[tuple[str, str]] = []

    async def scenario() -> Any:
        ended = asyncio.Event()
        process = Process(
            argv or puppet(*steps),
            environment=dict(os.environ),
            mark=f"/test/{uuid.uuid4()}",
            on_line=lambda stream, line: lines.append((stream, line)),
            on_exit=ended.set,
            **settings,
        )
        async with asyncio.timeout(TIMEOUT_S):
            await ended.wait()
            return await process.end(timeout_s=TIMEOUT_S)

    return lines, asyncio.run(scenario())


def test_lines_of_both_outputs_come_apart_and_whole() -> None:
    lines, end = run_to_end("say one two", "complain three", "say four", "exit 3")
    assert [line for stream, line in lines if stream == STDOUT] == ["one two", "four"]
    assert [line for stream, line in lines if stream == STDERR] == ["three"]
    assert end == (3, True)


def test_a_last_line_without_newline_is_not_lost() -> None:
    lines, _ = run_to_end(argv=("printf", "one\ntwo"))
    assert lines == [(STDOUT, "one"), (STDOUT, "two")]


def test_binary_output_becomes_printable_lines() -> None:
    lines, _ = run_to_end(argv=("head", "-c", "100000", "/dev/urandom"))
    assert lines
    assert {unicodedata.category(character) for _, line in lines for character in line if character != "\t"}.isdisjoint(
        {"Cc", "Cf", "Cs", "Zl", "Zp"}
    )


def test_a_signal_is_a_negative_status() -> None:
    assert run_to_end("die SIGTERM")[1] == (-signal.SIGTERM, True)


def test_what_it_started_goes_with_it_and_does_not_delay_its_end(folder: Path) -> None:
    lines, end = run_to_end(f"spawn {folder}/same", f"spawn {folder}/own own", "say done", "exit 0")
    assert (lines, end) == ([(STDOUT, "done")], (0, True))
    assert ends(int((folder / "same").read_text()))
    # Who left for a session of its own is not found by the group: nobody waits for it, and nobody ends it.
    os.kill(int((folder / "own").read_text()), signal.SIGKILL)


def scenario_with(steps: tuple[str, ...], play: Callable[[Process], Any]) -> Any:
    async def scenario() -> Any:
        ended = asyncio.Event()
        process = Process(
            puppet(*steps),
            environment=dict(os.environ),
            mark=f"/test/{uuid.uuid4()}",
            on_line=lambda stream, line: None,
            on_exit=ended.set,
        )
        async with asyncio.timeout(TIMEOUT_S):
            await play(process)
            await ended.wait()
            return await process.end(timeout_s=TIMEOUT_S)

    return asyncio.run(scenario())


def test_a_signal_reaches_the_main_process(folder: Path) -> None:
    async def play(process: Process) -> None:
        await until_file(folder / "report")
        process.send(signal.SIGTERM)

    assert scenario_with((f"end-on-term {folder}/ended", f"report {folder}/report", "wait"), play) == (0, True)
    assert (folder / "ended").exists()


def test_ending_one_that_still_runs_kills_it(folder: Path) -> None:
    async def scenario() -> Any:
        process = Process(
            puppet("ignore SIGTERM", f"report {folder}/report", "wait"),
            environment=dict(os.environ),
            mark=f"/test/{uuid.uuid4()}",
            on_line=lambda stream, line: None,
            on_exit=lambda: None,
        )
        await until_file(folder / "report")
        return await process.end(timeout_s=TIMEOUT_S)

    assert asyncio.run(scenario()) == (-signal.SIGKILL, True)


def test_a_signal_to_one_that_has_ended_is_nothing(folder: Path) -> None:
    async def play(process: Process) -> None:
        await until(lambda: process.exited)
        process.send(signal.SIGTERM)
        process.kill_group()

    assert scenario_with(("exit 5",), play) == (5, True)


def test_a_program_that_floods_the_terminal_lets_the_loop_live() -> None:
    async def scenario() -> int:
        turns = 0
        process = Process(
            ("yes",),
            environment=dict(os.environ),
            mark=f"/test/{uuid.uuid4()}",
            on_line=lambda stream, line: None,
            on_exit=lambda: None,
        )
        for _ in range(50):
            await asyncio.sleep(0.001)
            turns += 1
        process.kill_group()
        await process.end(timeout_s=TIMEOUT_S)
        return turns

    assert asyncio.run(scenario()) == 50


def test_a_start_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with pytest.raises(OSError, match="No such file"):
            Process(
                ("true",), environment={}, mark=f"/test/{uuid.uuid4()}", on_line=lambda *_: None, on_exit=lambda: None
            )

    monkeypatch.setattr("sys.executable", "/no/such/python")
    asyncio.run(scenario())
