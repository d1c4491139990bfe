"""What runs between fork and the program: descriptors to 3 and up, death with the supervisor, then exec.

Started by path with `python -I -S`, so that it is quick and needs nothing but the standard library. Arguments: the
supervisor's pid, the inherited descriptors and the CPUs, both separated by commas, and the program with its own
arguments. The descriptors' names come in LISTEN_FDNAMES.
"""

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Mapping, Sequence

FIRST_LISTEN_FD = 3
EXIT_EXEC = 203  # systemd's EXIT_EXEC

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Become the program; return a status only if that is not possible."""
    supervisor_pid, numbers, cpus, *argv = arguments
    descriptors = [int(number) for number in numbers.split(",") if number]
    # Python ignores some signals, and a supervisor in the background may ignore more: the program starts with none.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        return _failed("cannot be tied to the supervisor's life", OSError(ctypes.get_errno(), "prctl"))
    if os.getppid() != int(supervisor_pid):  # it died before the line above
        return EXIT_EXEC
    try:
        if cpus:
            os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
        arrange(descriptors)
        os.execvpe(argv[0], argv, environment(os.environ, descriptors=len(descriptors)))  # noqa: S606
    except OSError as error:
        return _failed(f"cannot start {argv[0]}", error)


def arrange(numbers: Sequence[int]) -> None:
    """Put these descriptors, in this order, at 3 and up, open across exec; their old numbers are closed."""
    end = FIRST_LISTEN_FD + len(numbers)
    # A number that some other descriptor is about to get has to be cleared first.
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, end) if number < end else number for number in numbers]
    for target, number in enumerate(moved, start=FIRST_LISTEN_FD):
        os.dup2(number, target, inheritable=True)
    for number in set(moved):
        os.close(number)


def environment(inherited: Mapping[str, str], *, descriptors: int) -> dict[str, str]:
    """Return the program's environment: what may only be known now is its pid."""
    own = dict(inherited)
    pid = str(os.getpid())
    if descriptors:
        own |= {"LISTEN_FDS": str(descriptors), "LISTEN_PID": pid}
    if "WATCHDOG_USEC" in own:
        own["WATCHDOG_PID"] = pid
    return own


def _failed(what: str, error: OSError) -> int:
    print(f"{what}: {error.strerror}", file=sys.stderr)
    return EXIT_EXEC


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
