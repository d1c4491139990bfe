"""One run of a program under supervision: started, heard, signalled, and gone with all that it started."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from appliance.descriptors import Descriptor
from appliance.lines import LineSplitter
from appliance.up import child
from appliance.up.group import kill_members

STDOUT, STDERR = "stdout", "stderr"

# Little enough that a program that floods its output lets all others have their turns.
_READ_BYTES = 1 << 14
# What a process that is gone may have left in a pipe; whatever else writes there is none of ours.
_LAST_READS = 128


@dataclass
class _Pipe:
    stream: str
    reading: Descriptor
    splitter: LineSplitter


class Process:
    """Starts at once; OSError where that fails. `on_line` gets (stream, line), `on_exit` is called once.

    The kernel kills the program when the thread that runs the event loop ends, however it ends.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        mark: str,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[], None],
        descriptors: Sequence[tuple[str, int]] = (),
        cpus: Sequence[int] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._mark = mark
        self._on_line = on_line
        self._on_exit = on_exit
        self._pipes: list[_Pipe] = []
        self._popen = self._start(argv, environment, descriptors, cpus)
        try:
            self._pidfd = Descriptor(os.pidfd_open(self._popen.pid))
        except OSError:  # no descriptor is left for it: it could not be looked after
            self._popen.kill()
            self._popen.wait()
            raise
        self.exited = False
        self._loop.add_reader(self._pidfd.fileno(), self._on_pidfd)
        for pipe in self._pipes:
            self._loop.add_reader(pipe.reading.fileno(), self._on_pipe, pipe)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, number: int) -> None:
        """Send a signal to the main process; nothing happens once it has ended."""
        # Not Popen's way: that would reap it, and its number with it, while its group still has to be killed by it.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd.fileno(), number)

    def kill_group(self) -> None:
        """SIGKILL the main process and its process group; `end` has not been called yet."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self, *, timeout_s: float) -> tuple[int | None, bool]:
        """Kill whatever is left, read what it said, reap it. Returns the exit status, and whether all are gone.

        The status is negative for a signal, and None where even SIGKILL did not end the main process in time.
        """
        gone = await asyncio.to_thread(kill_members, self.pid, self._mark, timeout_s=timeout_s)
        self._stop_listening()
        for pipe in self._pipes:
            self._read_last(pipe)
            pipe.reading.close()
        self._pidfd.close()
        # Where all have ended this does not wait, and it must not come back without the status.
        return self._popen.wait() if gone else self._popen.poll(), gone

    def _start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[tuple[str, int]],
        cpus: Sequence[int],
    ) -> subprocess.Popen[bytes]:
        numbers = [fd for _, fd in descriptors]
        named = {"LISTEN_FDNAMES": ":".join(name for name, _ in descriptors)} if descriptors else {}
        shim = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
        stdout, stderr = self._pipe(STDOUT), self._pipe(STDERR)
        with stdout, stderr:
            return subprocess.Popen(
                [*shim, ",".join(map(str, numbers)), ",".join(map(str, cpus)), *argv],
                env={**environment, **named},
                stdin=subprocess.DEVNULL,
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
                pass_fds=numbers,
                start_new_session=True,
            )

    def _pipe(self, stream: str) -> Descriptor:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        self._pipes.append(_Pipe(stream, Descriptor(reading), LineSplitter()))
        return Descriptor(writing)

    def _on_pidfd(self) -> None:
        self._loop.remove_reader(self._pidfd.fileno())
        self.exited = True
        self._on_exit()

    def _on_pipe(self, pipe: _Pipe) -> None:
        try:
            data = os.read(pipe.reading.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(pipe.reading.fileno())
        self._say(pipe, pipe.splitter.feed(data))

    def _read_last(self, pipe: _Pipe) -> None:
        for _ in range(_LAST_READS):
            try:
                data = os.read(pipe.reading.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                break
            self._say(pipe, pipe.splitter.feed(data))
        self._say(pipe, pipe.splitter.rest())

    def _say(self, pipe: _Pipe, lines: Sequence[str]) -> None:
        for line in lines:
            self._on_line(pipe.stream, line)

    def _stop_listening(self) -> None:
        self._loop.remove_reader(self._pidfd.fileno())
        for pipe in self._pipes:
            self._loop.remove_reader(pipe.reading.fileno())
