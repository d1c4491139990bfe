"""A child that is of no use without its parent ends with it."""

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; prctl(2). Kept across exec, not fork.

    One that `multiprocessing` started ends at once if its parent is gone already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
