"""The test suite's own guard: a test that leaks fails, a marked one does not, and a tier says why it cannot run."""

import sys
from pathlib import Path

import pytest

from appliance.run import run

CONFTEST = Path(__file__).with_name("conftest.py")
LEAKS = {
    "descriptor": "import os; os.dup(0)",
    "thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "process": "import subprocess; left = subprocess.Popen(['sleep', '60'])",
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_test_that_leaves_something_behind_fails_and_says_what(kind: str, tmp_path: Path) -> None:
    outcome = pytest_on(tmp_path, f"def test_it():\n    global left; {LEAKS[kind]}\n")
    assert "1 passed, 1 error" in outcome
    assert f"the test left behind: {kind}" in outcome


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_with_a_reason_is_let_through(kind: str, tmp_path: Path) -> None:
    code = f"import pytest\n@pytest.mark.leaks('on purpose')\ndef test_it():\n    global left; {LEAKS[kind]}\n"
    assert "1 passed in" in pytest_on(tmp_path, code)


def test_a_leak_marker_without_a_reason_is_refused(tmp_path: Path) -> None:
    code = "import pytest\n@pytest.mark.leaks()\ndef test_it(): pass\n"
    assert "wants a reason" in pytest_on(tmp_path, code)


def test_a_clean_test_passes(tmp_path: Path) -> None:
    code = "import threading\ndef test_it():\n    threading.Thread(target=print).start()\n"
    assert "1 passed in" in pytest_on(tmp_path, code)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_a_tier_that_cannot_run_skips_on_a_laptop_and_fails_in_ci(tmp_path: Path) -> None:
    code = "import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n"
    assert "1 skipped" in (laptop := pytest_on(tmp_path, code)) and "gpu: there is no NVIDIA GPU" in laptop
    assert "cannot run in CI: gpu: there is no NVIDIA GPU" in pytest_on(tmp_path, code, ci="true")


def pytest_on(directory: Path, code: str, *, ci: str = "") -> str:
    """Run one test file under a copy of this suite's conftest.py and return what pytest prints."""
    (directory / "conftest.py").write_text(CONFTEST.read_text())
    (directory / "test_it.py").write_text(code)
    markers = ["leaks(reason)", "gpu"]
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"    {marker}\n" for marker in markers))
    environment = {"PATH": "/usr/bin:/bin", "CI": ci, "PYTHONPATH": str(CONFTEST.parent.parent)}
    # run() ends the process group: what the inner test left behind does not outlive this one.
    argv = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider"]
    done = run(argv, timeout_s=60.0, environment=environment, directory=directory, accept=range(6))
    return done.stdout + done.stderr
