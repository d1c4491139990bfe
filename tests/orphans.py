"""A process whose parent is killed: whether it goes on."""

import os
import select
import signal
import subprocess

TIMEOUT_S = 60.0


def outlives(parent: "subprocess.Popen[str]", *, timeout_s: float = TIMEOUT_S) -> bool:
    """Kill a process that prints its child's id; return whether that is there so long afterwards, and end it."""
    assert parent.stdout is not None
    gone = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait(TIMEOUT_S)
        if select.select([gone], [], [], timeout_s)[0]:
            return False
        signal.pidfd_send_signal(gone, signal.SIGKILL)
        select.select([gone], [], [], TIMEOUT_S)
        return True
    finally:
        os.close(gone)
