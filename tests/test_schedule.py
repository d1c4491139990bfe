"""Two processes of the tests: hosts are in one of them, in order, and what takes minutes is begun first."""

import os
import sys
from pathlib import Path

from appliance.run import run
from tests.schedule import LONG, TOGETHER

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
    assert [path for path in (*LONG, *TOGETHER) if not (ROOT / path).exists()] == []
    assert set(TOGETHER) <= set(LONG)


def test_hosts_stay_in_one_process_and_long_files_come_first(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "host").mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "note.py").write_text(NOTE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = leaks\n")
    for name in (f"test_a{number}.py" for number in range(8)):
        (tests / name).write_text(code(MANY))
    for name in ("host/test_b.py", "host/test_c.py", "test_equivalence.py"):
        (tests / name).write_text(code(FEW))
    log = tmp_path / "log"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}", "LOG": str(log)}
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2"]
    done = run(argv, timeout_s=120.0, environment=environment, directory=tmp_path, accept=range(6))
    assert f"{8 * MANY + 3 * FEW} passed" in done.stdout, done.stdout + done.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    share = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert {threads for _, threads, _ in lines} == {str(share)}
    taken = {worker: [Path(file).name for one, _, file in lines if one == worker] for worker in ("gw0", "gw1")}
    hosts, others = sorted(taken.values(), key=lambda files: "test_b.py" not in files)
    assert hosts[:6] == ["test_b.py"] * FEW + ["test_c.py"] * FEW
    assert others[:FEW] == ["test_equivalence.py"] * FEW
    assert not {"test_b.py", "test_c.py"} & set(others)
    # No file is in two processes.
    assert not set(hosts) & set(others)
