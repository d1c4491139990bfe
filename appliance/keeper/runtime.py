"""A model's runtime directory: who may enter, the lock that says which keeper it belongs to, and the socket in it."""

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from appliance.descriptors import Descriptor
from appliance.errors import HostError, ResourceError

LOCK_NAME = "keeper.lock"
BACKLOG = 1024


@contextlib.contextmanager
def locked(runtime: Path, *, gid: int | None) -> Iterator[None]:
    """Hold the directory, made where there is none, open to its owner and one group only.

    ResourceError naming the keeper that has it; HostError where others could put something of theirs into it.
    """
    path = runtime / LOCK_NAME
    try:
        runtime.mkdir(mode=0o750, parents=True, exist_ok=True)
        with Descriptor(os.open(runtime, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
            _close_to_others(folder.fileno(), runtime, gid=gid)
            # Whoever can open it can lock it: it is the owner's alone.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = Descriptor(os.open(LOCK_NAME, flags, 0o600, dir_fd=folder.fileno()))
    except OSError as error:
        raise HostError(f"cannot use {path}: {error.strerror}", hint="who owns the runtime directory?") from error
    with lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock.fileno(), 32, 0).decode(errors="replace").strip()
            raise ResourceError(f"another keeper (pid {holder or 'unknown'}) serves {runtime}") from error
        pid = f"{os.getpid()}\n".encode()
        os.pwrite(lock.fileno(), pid, 0)
        os.ftruncate(lock.fileno(), len(pid))
        yield


def listen(path: Path, *, gid: int | None) -> socket.socket:
    """Return the listening socket, for the owner and one group. The caller holds the lock, so a file there is stale."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        old_mask = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old_mask)
        if gid is not None:
            os.chown(path, -1, gid, follow_symlinks=False)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise HostError(f"cannot listen on {path}: {error.strerror or error}") from error
    return listener


def _close_to_others(fd: int, runtime: Path, *, gid: int | None) -> None:
    status = os.fstat(fd)
    if status.st_uid == os.geteuid():
        if gid is not None and status.st_gid != gid:
            os.fchown(fd, -1, gid)
        if stat.S_IMODE(status.st_mode) != 0o750:
            os.fchmod(fd, 0o750)
    elif status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HostError(
            f"{runtime} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}: others could put "
            "a socket of theirs there",
            hint="remove it, or set another directories.runtime",
        )
