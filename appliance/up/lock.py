"""The right to supervise one runtime directory: one process has it, and loses it when it ends, however it ends."""

import fcntl
import os
import stat
from pathlib import Path

from appliance.descriptors import Descriptor
from appliance.errors import HostError, ResourceError

NAME = ".up"  # no model can have this name

_HINT = "set `directories` in the manifest to folders of your own, or run as the user who owns these"


def prepare(*directories: Path) -> None:
    """Make the manifest's directories; HostError naming the one that this user cannot write to."""
    for directory in directories:
        try:
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(f"{directory}: cannot be made: {error.strerror}", hint=_HINT) from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise HostError(f"{directory}: not writable by user {os.geteuid()}", hint=_HINT)


def claim(runtime: Path) -> tuple[Path, Descriptor]:
    """Return the supervisor's own folder in the runtime directory, and the lock on it, held until it is closed.

    ResourceError naming the process that has it; HostError where the folder cannot be used, or is another user's.
    """
    folder = runtime / NAME
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise HostError(f"{folder}: not a folder of user {os.geteuid()}", hint="remove it")
        folder.chmod(0o700)
        lock = Descriptor(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise HostError(f"{folder}: cannot be used: {error.strerror}", hint=_HINT) from error
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock.fileno(), 32, 0).decode("ascii", "replace").strip()
        lock.close()
        raise ResourceError(
            f"{runtime}: process {holder or '(not known yet)'} supervises this manifest already",
            hint="stop it first, or give this manifest another runtime directory",
        ) from error
    os.ftruncate(lock.fileno(), 0)
    os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
    return folder, lock
