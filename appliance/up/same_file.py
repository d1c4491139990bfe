"""Tell whether two descriptors are one open file, as PID 1 does before it stores a second one.

Equal device and inode do not mean that: every CUDA allocation comes from the same device node.
"""

import ctypes
import fcntl
import os
import platform
import stat
from contextlib import suppress

_F_DUPFD_QUERY = 1024 + 3  # linux/fcntl.h, since 6.10
_KCMP_FILE = 0
_KCMP_NUMBERS = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "ppc64le": 354, "s390x": 343}


def same_file(first: int, second: int) -> bool:
    """Return True only if both share one open file description. The kernel is asked in the newest way it knows."""
    if first == second:
        return True
    with suppress(OSError):  # an older kernel, or a filter that knows only older calls
        return bool(fcntl.fcntl(first, _F_DUPFD_QUERY, second))
    compared = _kcmp(first, second)
    return _looks_same(first, second) if compared is None else compared


def _kcmp(first: int, second: int) -> bool | None:
    number = _KCMP_NUMBERS.get(platform.machine())
    if number is None:
        return None
    pid = os.getpid()
    result = ctypes.CDLL(None).syscall(
        ctypes.c_long(number),
        ctypes.c_long(pid),
        ctypes.c_long(pid),
        ctypes.c_long(_KCMP_FILE),
        ctypes.c_ulong(first),
        ctypes.c_ulong(second),
    )
    return None if result < 0 else bool(result == 0)


def _looks_same(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    if (one.st_dev, one.st_ino) != (other.st_dev, other.st_ino):
        return False
    # Contexts of one device, and all anonymous inodes, look alike: keeping one too many loses nothing.
    if stat.S_ISCHR(one.st_mode) or stat.S_ISBLK(one.st_mode) or not stat.S_IFMT(one.st_mode):
        return False
    return fcntl.fcntl(first, fcntl.F_GETFL) == fcntl.fcntl(second, fcntl.F_GETFL)
