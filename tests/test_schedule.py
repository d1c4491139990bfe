"""Two processes of the tests: hosts are in one of them, in order, and what takes minutes is begun first."""

import os
import sys
from pathlib import Path

from appliance.run import run
from tests.schedule import LONG, SCATTERED, TOGETHER

ROOT = Path(__file__).parents[1]
NOTE = """import os, pathlib
def note(name):
    line = f"{os.environ['PYTEST_XDIST_WORKER']} {os.environ['OMP_NUM_THREADS']} {name}\\n"
    with pathlib.Path(os.environ["LOG"]).open("a") as log:
        log.write(line)
"""
MANY, FEW = 7, 3


def code(tests: int) -> str:
    return "from note import note\n" + "".join(f"def test_{number}(): note(__file__)\n" for number in range(tests))


def test_what_takes_long_is_there() -> None:
    assert [path for path in (*LONG, *TOGETHER, *SCATTERED) if not (ROOT / path).exists()] == []
    assert set(TOGETHER) <= set(LONG)


def ran(folder: Path, files: dict[str, int]) -> list[list[str]]:
    """Run files of so many tests in two processes; return process, threads and file of each test, in order."""
    for name, tests in files.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code(tests))
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (folder / "note.py").write_text(NOTE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = leaks\n")
    log = folder / "log"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{ROOT}", "LOG": str(log)}
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2"]
    done = run(argv, timeout_s=120.0, environment=environment, directory=folder, accept=range(6))
    assert f"{sum(files.values())} passed" in done.stdout, done.stdout + done.stderr
    return [line.split() for line in log.read_text().splitlines()]


def test_tests_that_wait_for_processes_of_their_own_wait_beside_each_other(tmp_path: Path) -> None:
    lines = ran(tmp_path, {"gpu/test_engine.py": 8})
    assert {worker for worker, _, _ in lines} == {"gw0", "gw1"}


def test_hosts_stay_in_one_process_and_long_files_come_first(tmp_path: Path) -> None:
    short = {f"test_a{number}.py": MANY for number in range(8)}
    lines = ran(tmp_path, short | dict.fromkeys(("host/test_b.py", "host/test_c.py", "test_equivalence.py"), FEW))
    share = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert {threads for _, threads, _ in lines} == {str(share)}
    taken = {worker: [Path(file).name for one, _, file in lines if one == worker] for worker in ("gw0", "gw1")}
    hosts, others = sorted(taken.values(), key=lambda files: "test_b.py" not in files)
    assert hosts[:6] == ["test_b.py"] * FEW + ["test_c.py"] * FEW
    assert others[:FEW] == ["test_equivalence.py"] * FEW
    assert not {"test_b.py", "test_c.py"} & set(others)
    # No file is in two processes.
    assert not set(hosts) & set(others)
