"""A directory that takes long to make appears whole, once, whoever asks and whoever is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.demo.cache import default_cache, filled
from appliance.errors import HostError

# A maker that says that it has begun, waits for a line on standard input, and writes one file.
MAKER = """
import sys
from pathlib import Path
from appliance.demo.cache import filled

def make(directory):
    print("making", flush=True)
    (directory / "first").write_text("first")
    sys.stdin.readline()
    (directory / "second").write_text("second")

print(filled(Path(sys.argv[1]), make, on_progress=lambda line: print(line, flush=True)), flush=True)
"""


def test_it_is_made_once_and_then_found(tmp_path: Path) -> None:
    calls: list[Path] = []
    for _ in range(2):
        filled(tmp_path / "deep" / "it", calls.append, on_progress=print)
    assert len(calls) == 1
    assert (tmp_path / "deep" / "it").is_dir()


def test_a_maker_that_fails_leaves_nothing_and_the_next_one_starts_afresh(tmp_path: Path) -> None:
    def fails(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise HostError("no more")

    with pytest.raises(HostError, match="no more"):
        filled(tmp_path / "it", fails, on_progress=print)
    assert contents(tmp_path) == []
    filled(tmp_path / "it", lambda directory: (directory / "whole").touch(), on_progress=print)
    assert contents(tmp_path / "it") == ["whole"]


def test_a_full_disk_is_the_hosts_error_and_names_the_file(tmp_path: Path) -> None:
    def no_space(directory: Path) -> None:
        raise OSError(28, "No space left on device", str(directory / "it"))

    with pytest.raises(HostError, match=r"it: No space left on device"):
        filled(tmp_path / "it", no_space, on_progress=print)


def test_a_killed_maker_leaves_no_directory_and_the_next_one_makes_it_and_tidies_up(tmp_path: Path) -> None:
    with maker(tmp_path / "it") as killed:
        assert line(killed) == "making"
        killed.send_signal(signal.SIGKILL)
    assert not (tmp_path / "it").exists()
    with maker(tmp_path / "it") as second:
        assert line(second) == "making"
        say(second)
        assert line(second) == str(tmp_path / "it")
    assert contents(tmp_path) == ["it"]
    assert contents(tmp_path / "it") == ["first", "second"]


def test_of_two_processes_one_makes_it_and_the_other_waits_for_it(tmp_path: Path) -> None:
    with maker(tmp_path / "it") as one, maker_once(one, tmp_path / "it") as other:
        assert line(other) == f"waiting for another process that is making {tmp_path / 'it'}"
        assert not (tmp_path / "it").exists()
        say(one)
        assert line(one) == line(other) == str(tmp_path / "it")


def test_a_waiting_process_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    with maker(tmp_path / "it") as one, maker_once(one, tmp_path / "it") as other:
        assert line(other).startswith("waiting")
        one.send_signal(signal.SIGKILL)
        assert line(other) == "making"
        say(other)
        assert line(other) == str(tmp_path / "it")
    assert contents(tmp_path / "it") == ["first", "second"]


@pytest.mark.parametrize(("variable", "expected"), [("/somewhere", "/somewhere/appliance"), ("relative", None)])
def test_the_cache_is_where_the_user_says(variable: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert default_cache() == Path(expected or Path.home() / ".cache" / "appliance")


def maker(destination: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(destination)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def maker_once(first: "subprocess.Popen[str]", destination: Path) -> "subprocess.Popen[str]":
    """Start a second maker once the first one holds the lock."""
    assert line(first) == "making"
    return maker(destination)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def say(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def contents(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.endswith(".lock"))
