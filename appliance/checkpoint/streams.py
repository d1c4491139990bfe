"""Many files read and hashed side by side.

Where the pages are cached, hashing bounds the time and the cores must stay busy to the end: the file with the most left
goes first, a piece at a time, and a core with no file of its own reads ahead for another. Where they are not, a thread
that waits for the disk lets another one run: `threads` run at a time, a few more may wait.

While every core has a file of its own, each reads and hashes it in parts that stay in that core's cache, and tells the
others nothing.
"""

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from appliance.checkpoint.file_stream import FileStream, Piece, make_hasher
from appliance.checkpoint.files import CheckpointRoot
from appliance.quantities import format_size

PIECE_BYTES = 4 << 20
PART_BYTES = 1 << 20
FILES_IN_FLIGHT = 16
MAX_THREADS = 64
# Threads beyond those that run: they wait for disks and remote file systems.
WAITING_THREADS = 16
REPORT_EVERY_S = 0.1

# A file is left for another with more to do only when the difference is worth a seek.
_QUANTUM_BYTES = 64 << 20
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Progress:
    """How far a read is. `files_done` are read and hashed to their end, and right if there was a digest to be."""

    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int

    def __str__(self) -> str:
        """For example `34/66 files, 12.3 GiB`."""
        return f"{self.files_done}/{self.files_total} files, {format_size(self.bytes_done)}"


OnProgress = Callable[[Progress], None]
# A piece, and the scratch memory behind it that can be used again.
_Filled = tuple[Piece, memoryview | None]


def make_streams(
    root: CheckpointRoot,
    sizes_bytes: Mapping[str, int],
    *,
    algorithm: str,
    expected: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> list[FileStream]:
    """Return a stream for each path, with the digest expected of it where one is. Opens nothing."""
    threads = threads or usable_cpus()
    fair_bytes = max(1, sum(sizes_bytes.values()) // threads)
    return [
        FileStream(
            root,
            path,
            size_bytes=size_bytes,
            # A file larger than its fair share would end last: BLAKE3 can use several cores for one file.
            hasher=make_hasher(algorithm, threads=min(threads, 1 + size_bytes // fair_bytes)),
            expected=None if expected is None else expected[path],
        )
        for path, size_bytes in sizes_bytes.items()
    ]


def usable_cpus() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def run_streams(
    streams: Sequence[FileStream], *, threads: int | None = None, on_progress: OnProgress | None = None
) -> None:
    """Read and hash all of them to the end; the first failure stops the rest and is raised. All are closed after.

    `threads` hash at a time (default: one a core). `on_progress` is called in the caller's thread, about ten times a
    second and once at the end. Scratch memory is at most PIECE_BYTES for each thread and each file in flight.
    """
    threads = min(threads or usable_cpus(), MAX_THREADS)
    try:
        _Work(streams, threads).run(on_progress)
    finally:
        for stream in streams:
            stream.close()


class _Lane:
    """A stream in flight. At most one piece of it is being read, or waits; and one is being hashed."""

    def __init__(self, stream: FileStream) -> None:
        self.stream = stream
        self.left_bytes = stream.size_bytes - stream.position
        self.opened = stream.is_open
        self.reading = False
        self.hashing = False
        self.read_out = False
        self.filled: _Filled | None = None

    def can_read(self) -> bool:
        return not self.reading and not self.read_out and self.filled is None

    def can_go_on(self) -> bool:
        return not self.hashing and (self.filled is not None or self.can_read())


class _Work:
    """The streams of one run, and the threads that carry them along. Every field is guarded by `_changed`."""

    def __init__(self, streams: Sequence[FileStream], threads: int) -> None:
        self._files_total = len(streams)
        self._bytes_total = sum(stream.size_bytes for stream in streams)
        self._files_done = 0
        self._bytes_done = sum(stream.position for stream in streams)
        self._waiting = deque(sorted(streams, key=lambda stream: stream.size_bytes, reverse=True))
        self._lanes: list[_Lane] = []
        self._lanes_limit = max(FILES_IN_FLIGHT, threads)
        self._workers: list[threading.Thread] = []
        self._workers_limit = min(threads + WAITING_THREADS, 2 * len(streams))
        self._idle = 0
        self._running = 0
        self._running_limit = threads
        self._spare: list[memoryview] = []
        self._error: BaseException | None = None
        self._stopped = not streams
        self._changed = threading.Condition()
        self._ended = threading.Event()

    def run(self, on_progress: OnProgress | None) -> None:
        try:
            with self._changed:
                for _ in range(min(self._running_limit, self._workers_limit)):
                    self._start_worker()
            while self._workers and not self._ended.wait(REPORT_EVERY_S):
                if on_progress:
                    on_progress(self._progress())
        finally:
            self._stop(None)
            for worker in self._workers:
                worker.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if on_progress:
            on_progress(self._progress())

    def _progress(self) -> Progress:
        with self._changed:
            return Progress(self._files_done, self._files_total, self._bytes_done, self._bytes_total)

    def _stop(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()
        self._ended.set()

    def _start_worker(self) -> None:
        worker = threading.Thread(target=self._worker, name=f"checkpoint-{len(self._workers)}")
        worker.start()
        self._workers.append(worker)

    def _worker(self) -> None:
        lane: _Lane | None = None
        try:
            while (step := self._next_step(lane)) is not None:
                lane, take = step
                take()
        except BaseException as error:  # it goes to the thread that called
            self._stop(error)

    def _next_step(self, last: _Lane | None) -> tuple[_Lane, Callable[[], None]] | None:
        """Wait for work and a turn to run, and claim both; None at the end."""
        with self._changed:
            while not self._stopped:
                lane = self._choose(last) if self._running < self._running_limit else None
                if lane is None:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                    continue
                self._running += 1
                take = self._claim(lane)
                self._wake_another()
                return lane, take
        return None

    def _claim(self, lane: _Lane) -> Callable[[], None]:
        if not lane.hashing and lane.filled is not None:
            filled, lane.filled = lane.filled, None
            lane.hashing = True
            return partial(self._hash, lane, *filled)
        lane.reading = True
        if not lane.opened:
            return partial(self._open, lane)
        if not lane.hashing and lane.stream.destination is None and len(self._lanes) >= self._running_limit:
            lane.hashing = True
            return partial(self._carry, lane)
        return partial(self._read, lane)

    def _wake_another(self) -> None:
        # Whoever changes something looks for work next, so each has to wake only one more, while turns last.
        if self._idle and self._running < self._running_limit and self._choose(None) is not None:
            self._changed.notify()

    def _choose(self, last: _Lane | None) -> _Lane | None:
        while self._waiting and len(self._lanes) < self._lanes_limit:
            self._lanes.append(_Lane(self._waiting.popleft()))
        lanes = [lane for lane in self._lanes if lane.can_go_on()] or [lane for lane in self._lanes if lane.can_read()]
        return max(lanes, key=lambda lane: (lane.left_bytes // _QUANTUM_BYTES, lane is last), default=None)

    def _open(self, lane: _Lane) -> None:
        self._give_turn()
        lane.stream.open()
        with self._changed:
            lane.opened, lane.reading = True, False

    def _carry(self, lane: _Lane) -> None:
        """Read and hash a piece for as long as there is nothing to wait for."""
        stream, scratch = lane.stream, self._take_scratch()
        wanted_bytes = min(PIECE_BYTES, stream.size_bytes - stream.position)
        hashed_bytes = stream.hash_cached(scratch[:PART_BYTES], limit_bytes=wanted_bytes)
        if hashed_bytes == wanted_bytes:
            with self._changed:
                self._end_read(lane)
            self._end_piece(lane, hashed_bytes, scratch)
            return
        with self._changed:
            lane.hashing = False
            self._count_hashed(lane, hashed_bytes)
            self._spare.append(scratch)
        self._read(lane)

    def _read(self, lane: _Lane) -> None:
        """Read a piece. Hash it too if nobody hashes what is before it, with the turn that this thread has."""
        piece, scratch = self._next_piece(lane.stream)
        unread = lane.stream.read(piece, wait=False)
        if unread:
            self._give_turn(waiting=True)
            lane.stream.read(unread)
        with self._changed:
            self._end_read(lane)
            if unread or lane.hashing:
                lane.filled = piece, scratch
                self._running -= not unread
                return
            lane.hashing = True
            self._wake_another()
        self._hash(lane, piece, scratch)

    def _hash(self, lane: _Lane, piece: Piece, scratch: memoryview | None) -> None:
        lane.stream.hash(piece)
        self._end_piece(lane, sum(view.nbytes for view in piece), scratch)

    def _end_piece(self, lane: _Lane, size_bytes: int, scratch: memoryview | None) -> None:
        with self._changed:
            done = lane.read_out and lane.filled is None
        if done:
            lane.stream.finish()
        with self._changed:
            lane.hashing = False
            self._count_hashed(lane, size_bytes)
            self._running -= 1
            if scratch is not None:
                self._spare.append(scratch)
            if done:
                self._lanes.remove(lane)
                self._files_done += 1
            if self._files_done < self._files_total:
                return
        self._stop(None)

    def _end_read(self, lane: _Lane) -> None:
        lane.reading = False
        lane.read_out = lane.stream.position >= lane.stream.size_bytes

    def _count_hashed(self, lane: _Lane, size_bytes: int) -> None:
        lane.left_bytes -= size_bytes
        self._bytes_done += size_bytes

    def _give_turn(self, *, waiting: bool = False) -> None:
        """Let another thread run while this one waits: a disk may take long enough to start one for it."""
        with self._changed:
            self._running -= 1
            if self._idle:
                self._changed.notify()
            elif waiting and not self._stopped and len(self._workers) < self._workers_limit:
                self._start_worker()

    def _next_piece(self, stream: FileStream) -> _Filled:
        if stream.destination is not None:
            piece = next(stream.destination, [])
            if not any(view.nbytes for view in piece) and stream.position < stream.size_bytes:
                raise ValueError(f"{stream.path}: its destination is smaller than the file")
            return piece, None
        size_bytes = min(PIECE_BYTES, stream.size_bytes - stream.position)
        if size_bytes < _SMALL_BYTES:
            return [memoryview(bytearray(size_bytes))], None
        scratch = self._take_scratch()
        return [scratch[:size_bytes]], scratch

    def _take_scratch(self) -> memoryview:
        # New memory costs more than hashing what is read into it: every page of it is a fault.
        with self._changed:
            scratch = self._spare.pop() if self._spare else None
        return scratch or _new_scratch()


def _new_scratch() -> memoryview:
    """Return PIECE_BYTES of memory that begins with a page: the kernel copies to it twice as fast as elsewhere."""
    # Private: shared memory, mmap's default, has no huge pages.
    memory = mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
