"""The one way to run a short program: an argument list, a time limit, its output captured. Never a shell."""

import errno
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import IO

from appliance.descriptors import Descriptor
from appliance.errors import HostError, ResourceError
from appliance.lines import last_line, printable

OUTPUT_LIMIT_BYTES = 16 << 20

_READ_BYTES = 1 << 16
_SHOWN_CHARACTERS = 200
# Where the machine is short of something now, and may not be later.
_SHORTAGES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class _Problem(Enum):
    TIMEOUT = auto()
    FLOOD = auto()


@dataclass(frozen=True)
class Completed:
    """What a program left behind; bytes that are not UTF-8 are spelled out as `\\xNN`."""

    exit_status: int  # negative: the signal that ended it, accepted by number
    stdout: str
    stderr: str


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    stdin: bytes = b"",
    accept: Collection[int] = (0,),
    limit_bytes: int = OUTPUT_LIMIT_BYTES,
) -> Completed:
    """Run a program to its end and return what it wrote.

    HostError where it cannot be started, ends with a status outside `accept` or writes more than `limit_bytes`;
    ResourceError where it takes longer than `timeout_s` or the machine is short of processes, memory or descriptors.
    The message names the command and the last line of its standard error. Whatever happens, its process group has
    been killed afterwards. `environment` replaces this process's own.
    """
    command = [os.fspath(part) for part in argv]
    process = _start(command, stdin, environment=environment, directory=directory)
    outputs = bytearray(), bytearray()
    try:
        problem = _collect(process, outputs, limit_bytes=limit_bytes, timeout_s=timeout_s)
    finally:
        # Not reaped yet, so the number still is this group's and nobody else's.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        exit_status = process.wait()
        for pipe in _pipes(process):
            pipe.close()
    stdout, stderr = map(bytes, outputs)
    said = last_line(stderr)
    if problem is _Problem.TIMEOUT:
        raise ResourceError(_message(command, f"not finished after {timeout_s:g} s", said))
    if problem is _Problem.FLOOD:
        raise HostError(_message(command, f"wrote more than {limit_bytes} bytes", said))
    if exit_status not in accept:
        raise HostError(_message(command, ending(exit_status), said))
    return Completed(
        exit_status, stdout.decode("utf-8", "backslashreplace"), stderr.decode("utf-8", "backslashreplace")
    )


def ending(exit_status: int) -> str:
    """Return how a process ended, in words; a negative status is the signal that ended it."""
    if exit_status >= 0:
        return f"exited with status {exit_status}"
    try:
        return f"ended by {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"ended by signal {-exit_status}"


def _start(
    command: Sequence[str], stdin: bytes, *, environment: Mapping[str, str] | None, directory: Path | None
) -> subprocess.Popen[bytes]:
    try:
        # A file, not a pipe: nobody has to write while the program is being read.
        with Descriptor(os.memfd_create("stdin", os.MFD_CLOEXEC)) as given:
            with os.fdopen(given.fileno(), "wb", closefd=False) as file:
                file.write(stdin)
            os.lseek(given.fileno(), 0, os.SEEK_SET)
            return subprocess.Popen(
                command,
                stdin=given.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=directory,
                bufsize=0,
                start_new_session=True,
            )
    except FileNotFoundError as error:
        if directory is not None and not directory.is_dir():
            raise HostError(f"{directory}: no such directory to run {command[0]!r} in") from error
        raise HostError(f"{command[0]}: no such program", hint="install it, or put it on PATH") from error
    except OSError as error:
        kind = ResourceError if error.errno in _SHORTAGES else HostError
        raise kind(_message(command, f"cannot be started: {error.strerror}", "")) from error


def _collect(
    process: subprocess.Popen[bytes], outputs: tuple[bytearray, bytearray], *, limit_bytes: int, timeout_s: float
) -> _Problem | None:
    """Fill stdout and stderr until the program has ended, or must be ended."""
    deadline = time.monotonic() + timeout_s
    with Descriptor(os.pidfd_open(process.pid)) as exited, selectors.DefaultSelector() as selector:
        selector.register(exited, selectors.EVENT_READ)
        for pipe in _pipes(process):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        ended = False
        # Its end counts, not that of its output: a child of its own may hold the pipes open for ever.
        while not ended:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return _Problem.TIMEOUT
            ended = exited in [key.fileobj for key, _ in selector.select(left_s)]
            for pipe, output in zip(_pipes(process), outputs, strict=True):
                if pipe in selector.get_map() and not _read(pipe.fileno(), output, limit_bytes):
                    selector.unregister(pipe)
                if len(output) > limit_bytes:
                    return _Problem.FLOOD
    return None


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdout is not None and process.stderr is not None  # noqa: S101
    return process.stdout, process.stderr


def _read(fd: int, output: bytearray, limit_bytes: int) -> bool:
    """Read what is there; False at the end of the stream."""
    while len(output) <= limit_bytes:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        output += data
    return True


def _message(command: Sequence[str], what: str, said: str) -> str:
    shown = printable(shlex.join(command))
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}..."
    return f"{shown}: {what}: {said}" if said else f"{shown}: {what}"
