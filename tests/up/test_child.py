import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from appliance.up import child
from tests.up.stage import TIMEOUT_S, ends, puppet, until_file

SHIM = (sys.executable, "-I", "-S", child.__file__)


def started(*argv: str, fds: Sequence[int] = (), names: str = "", cpus: str = "", **options: Any) -> Any:
    environment = {"PATH": os.environ["PATH"], **({"LISTEN_FDNAMES": names} if fds else {})}
    environment |= options.pop("environment", {})
    numbers = ",".join(map(str, fds))
    return subprocess.run(
        [*SHIM, str(os.getpid()), numbers, cpus, *argv],
        pass_fds=fds,
        env=environment,
        check=False,
        capture_output=True,
        timeout=TIMEOUT_S,
        **options,
    )


def reported(folder: Path, fds: Sequence[int] = (), **options: Any) -> dict[str, Any]:
    done = started(*puppet(f"report {folder}/report"), fds=fds, **options)
    assert (done.returncode, done.stderr) == (0, b"")
    report: dict[str, Any] = json.loads((folder / "report").read_text())
    return report


def test_without_descriptors_no_variable_speaks_of_any(folder: Path) -> None:
    report = reported(folder)
    assert report["fds"] == [0, 1, 2]
    assert not [name for name in report["environment"] if name.startswith(("LISTEN_", "WATCHDOG_"))]


@pytest.mark.parametrize("count", [1, 2, 250])
def test_descriptors_arrive_at_3_and_up_in_order_with_names_and_the_programs_own_pid(folder: Path, count: int) -> None:
    fds = [os.memfd_create("test") for _ in range(count)]
    try:
        for index, fd in enumerate(fds):
            os.write(fd, b"content %d" % index)
        report = reported(folder, fds, names=":".join(f"name-{index}" for index in range(count)))
    finally:
        for fd in fds:
            os.close(fd)
    assert report["fds"] == list(range(3 + count))
    assert report["held"] == {f"name-{index}": f"content {index}" for index in range(count)}
    assert report["environment"]["LISTEN_PID"] == str(report["pid"])


def test_numbers_that_overlap_their_places_are_not_lost(folder: Path) -> None:
    fds = [os.memfd_create("test") for _ in range(6)]
    for index, fd in enumerate(fds):
        os.write(fd, b"%d" % index)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import child\n"
        "given = [int(n) for n in sys.argv[2].split(',')]\n"
        "for place, number in enumerate([5, 3, 8, 4, 20, 7]): os.dup2(given[place], number + 100)\n"
        "[os.close(fd) for fd in given]\n"
        "for number in [5, 3, 8, 4, 20, 7]: os.dup2(number + 100, number); os.close(number + 100)\n"
        "child.arrange([5, 3, 8, 4, 20, 7])\n"
        "print([os.pread(fd, 9, 0).decode() for fd in range(3, 9)], [os.get_inheritable(fd) for fd in range(3, 9)])\n"
        "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, str(Path(child.__file__).parent), ",".join(map(str, fds))],
            pass_fds=fds,
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    finally:
        for fd in fds:
            os.close(fd)
    assert done.stdout == f"{[str(n) for n in range(6)]} {[True] * 6}\n{list(range(9))}\n"


def test_a_watchdog_is_told_the_programs_own_pid(folder: Path) -> None:
    report = reported(folder, environment={"WATCHDOG_USEC": "1000000"})
    assert report["environment"]["WATCHDOG_PID"] == str(report["pid"])


def test_a_program_that_cannot_be_started_is_named_with_systemds_status() -> None:
    done = started("/no/such/program")
    assert (done.returncode, done.stderr) == (203, b"cannot start /no/such/program: No such file or directory\n")


def test_the_program_ignores_and_blocks_no_signal_though_its_supervisor_does() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    done = started("grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status", preexec_fn=ignore)
    # 32 and 33 are the C library's own, which whoever is spawned may ignore, as Python since 3.13 has it.
    ours = ~(0b11 << 31)
    assert [int(line.split()[1], 16) & ours for line in done.stdout.splitlines()] == [0, 0]


def test_the_program_runs_on_the_cpus_it_was_given() -> None:
    cpu = min(os.sched_getaffinity(0))
    done = started(sys.executable, "-I", "-S", "-c", "import os; print(os.sched_getaffinity(0))", cpus=str(cpu))
    assert done.stdout.decode() == f"{{{cpu}}}\n"


def test_cpus_that_do_not_exist_are_refused() -> None:
    done = started("true", cpus="8191")
    assert (done.returncode, done.stderr) == (203, b"cannot start true: Invalid argument\n")


def test_nothing_is_started_for_a_supervisor_that_is_dead(folder: Path) -> None:
    done = subprocess.run(
        [*SHIM, "1" if os.getppid() != 1 else "2", "", "", *puppet(f"report {folder}/report")],
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 203
    assert not (folder / "report").exists()


def test_the_program_dies_with_the_process_that_started_it(folder: Path) -> None:
    code = "import os, subprocess, sys\nsubprocess.run([*sys.argv[1:5], str(os.getpid()), '', '', *sys.argv[5:]])\n"
    parent = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, *SHIM, *puppet(f"report {folder}/report", "wait")]
    )
    asyncio.run(asyncio.wait_for(until_file(folder / "report"), TIMEOUT_S))
    parent.kill()
    parent.wait()
    assert ends(json.loads((folder / "report").read_text())["pid"])
