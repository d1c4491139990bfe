"""A child that is tied to its parent ends with it, and only such a one does."""

import os
import select
import signal
import subprocess
import sys

import pytest

TIMEOUT_S = 30.0
# Prints its pid once it is tied (or not), and sleeps; the write end of the pipe closes when it is gone.
CHILD = "import sys, os, time\n{tie}\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
TIE = "from appliance.lifeline import end_with_parent; end_with_parent()"
PARENT = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize(("tie", "ends"), [(TIE, True), ("", False)])
def test_a_tied_child_does_not_outlive_its_parent(tie: str, ends: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD.format(tie=tie)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        gone = os.pidfd_open(child)
        try:
            parent.kill()
            parent.wait(TIMEOUT_S)
            ready, _, _ = select.select([gone], [], [], TIMEOUT_S if ends else 0.5)
            assert bool(ready) is ends
            if not ends:
                signal.pidfd_send_signal(gone, signal.SIGKILL)
                select.select([gone], [], [], TIMEOUT_S)
        finally:
            os.close(gone)
