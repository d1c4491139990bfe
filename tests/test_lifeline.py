"""A child that is tied to its parent ends with it, and only such a one does."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.orphans import outlives

TIMEOUT_S = 30.0
# Prints its pid once it is tied (or not), and sleeps; the write end of the pipe closes when it is gone.
CHILD = "import sys, os, time\n{tie}\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
TIE = "from appliance.lifeline import end_with_parent; end_with_parent()"
PARENT = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"

# Its child ties itself only when its parent is gone.
LATE = """
import multiprocessing, os, time
from appliance.lifeline import end_with_parent

def late():
    print(os.getpid(), flush=True)
    while multiprocessing.parent_process().is_alive():
        time.sleep(0.01)
    end_with_parent()
    time.sleep(600)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=late)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(("tie", "ends"), [(TIE, True), ("", False)])
def test_a_tied_child_does_not_outlive_its_parent(tie: str, ends: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD.format(tie=tie)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert outlives(parent, timeout_s=TIMEOUT_S if ends else 0.5) is not ends


def test_one_whose_parent_is_gone_already_ends_at_once(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert not outlives(parent, timeout_s=TIMEOUT_S)
