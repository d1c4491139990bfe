"""A file written whole or not at all: temporary name, fsync, rename, fsync of the directory."""

import contextlib
import os
import secrets
from pathlib import Path

from appliance.checkpoint.os_refusal import os_refusal
from appliance.errors import ConfigError


def write_durably(path: Path, data: bytes, *, mode: int, replace: bool, owner: tuple[int, int] | None = None) -> None:
    """Write the file with exactly these permission bits, whatever the umask, and for this user and group if given.

    With `replace` an older file (or link) of that name gives way in one step. Without, one that is there stays as it is
    and ConfigError says so. A reader sees the old bytes or the new ones; a failure leaves no temporary file behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _fill(fd, data, mode=mode, owner=owner)
            _give_name(temporary, path, replace=replace)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        _sync_directory(path.parent)
    except FileExistsError:
        raise ConfigError(f"{path} is already there and is not overwritten") from None
    except OSError as error:
        raise os_refusal(error, f"write {path}") from error


def _fill(fd: int, data: bytes, *, mode: int, owner: tuple[int, int] | None) -> None:
    try:
        if owner is not None:
            os.fchown(fd, *owner)
        os.fchmod(fd, mode)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _give_name(temporary: Path, path: Path, *, replace: bool) -> None:
    if replace:
        temporary.replace(path)
    else:
        # rename() would overwrite; link() fails when the name is taken, also by somebody faster.
        os.link(temporary, path)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
