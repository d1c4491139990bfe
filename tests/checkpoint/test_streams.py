"""Files read side by side: the right digests, bounded memory, progress told."""

import hashlib
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import blake3
import pytest

from appliance.checkpoint import streams
from appliance.checkpoint.file_stream import FileStream, Piece, make_hasher
from appliance.checkpoint.streams import Progress, run_streams
from tests.checkpoint.numbered import PIECE_BYTES, digests_of, make_files, streams_of

pytestmark = pytest.mark.usefixtures("stream_pieces")


@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(
    "sizes_bytes",
    [[], [0], [1], [PIECE_BYTES], [PIECE_BYTES + 1], [50 * PIECE_BYTES], [0, 1, 999, 1000, 1001, 2000, 12345] * 6],
    ids=lambda sizes: f"{len(sizes)}-files-{sum(sizes)}",
)
def test_digests_are_right_whatever_the_sizes_and_threads(
    tmp_path: Path, algorithm: str, threads: int, sizes_bytes: list[int]
) -> None:
    contents = make_files(tmp_path, sizes_bytes)
    done = streams_of(tmp_path, contents, algorithm=algorithm, threads=threads)
    run_streams(done, threads=threads)
    reference: Callable[[bytes], str] = (
        (lambda data: hashlib.sha256(data).hexdigest())
        if algorithm == "sha256"
        else (lambda data: blake3.blake3(data).hexdigest())
    )
    assert digests_of(done) == {name: reference(data) for name, data in contents.items()}


def test_pages_that_are_not_cached_are_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = make_files(tmp_path, [5 * PIECE_BYTES + 3] * 5)
    real = os.preadv
    waited: list[int] = []

    def nothing_is_cached(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise OSError(11 if offset % 2 else 95, "not without waiting")  # EAGAIN, EOPNOTSUPP
        waited.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", nothing_is_cached)
    done = streams_of(tmp_path, contents)
    run_streams(done)
    assert digests_of(done) == {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    assert len(waited) == 30


@pytest.mark.parametrize("threads", [1, 9])
def test_a_file_of_which_only_the_first_pages_are_cached_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    contents = make_files(tmp_path, [5 * PIECE_BYTES + 3] * 5)
    real = os.preadv
    cached_bytes = PIECE_BYTES * 3 // 2
    waited: set[int] = set()

    def some_are_cached(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            room = min(buffers[0].nbytes, cached_bytes - offset)
            if room <= 0:
                raise OSError(11, "not without waiting")  # EAGAIN
            return real(fd, [buffers[0][:room]], offset)
        waited.add(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", some_are_cached)
    done = streams_of(tmp_path, contents)
    run_streams(done, threads=threads)
    assert digests_of(done) == {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    assert min(waited) == cached_bytes


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = make_files(tmp_path, [3 * PIECE_BYTES + 3] * 2)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset, flags: real(fd, [views[0][:7]], offset, flags))
    done = streams_of(tmp_path, contents)
    run_streams(done)
    assert digests_of(done) == {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}


def test_while_one_thread_waits_for_the_disk_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = make_files(tmp_path, [PIECE_BYTES] * 4)
    real = os.preadv
    together = threading.Barrier(4, timeout=30)

    def wait_for_all(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(11, "would wait")
        together.wait()
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", wait_for_all)
    run_streams(streams_of(tmp_path, contents), threads=1)


def test_a_file_read_ahead_of_its_hashing_is_finished_with_its_last_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = make_files(tmp_path, [20 * PIECE_BYTES])
    (stream,) = streams_of(tmp_path, contents)
    ahead = threading.Condition()
    read, hash_piece = FileStream.read, FileStream.hash
    hashed: list[int] = []

    def read_and_tell(stream: FileStream, piece: Piece, *, wait: bool = True) -> Piece:
        rest = read(stream, piece, wait=wait)
        with ahead:
            ahead.notify_all()
        return rest

    def hash_when_the_next_is_read(stream: FileStream, piece: Piece) -> None:
        hashed.append(sum(view.nbytes for view in piece))
        with ahead:
            wanted = min(sum(hashed) + PIECE_BYTES, stream.size_bytes)
            assert ahead.wait_for(lambda: stream.position >= wanted, timeout=30)
        hash_piece(stream, piece)

    monkeypatch.setattr(FileStream, "read", read_and_tell)
    monkeypatch.setattr(FileStream, "hash", hash_when_the_next_is_read)
    run_streams([stream], threads=2)
    assert digests_of([stream]) == {"f000": hashlib.sha256(contents["f000"]).hexdigest()}
    assert hashed == [PIECE_BYTES] * 20


def test_no_more_hash_at_a_time_than_there_are_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = make_files(tmp_path, [3 * PIECE_BYTES] * 20)
    real, hash_piece = os.preadv, FileStream.hash
    counted = threading.Lock()
    running, most = 0, 0

    def nothing_is_cached(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(11, "would wait")
        return real(fd, buffers, offset)

    def hash_and_count(stream: FileStream, piece: Piece) -> None:
        nonlocal running, most
        with counted:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)  # long enough for another to come in, if another may
        hash_piece(stream, piece)
        with counted:
            running -= 1

    monkeypatch.setattr(os, "preadv", nothing_is_cached)
    monkeypatch.setattr(FileStream, "hash", hash_and_count)
    for threads in (1, 3):
        most = 0
        run_streams(streams_of(tmp_path, contents), threads=threads)
        assert most == threads


def test_the_file_with_the_most_left_goes_first_so_that_all_end_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_QUANTUM_BYTES", 1)
    contents = make_files(tmp_path, [400 * PIECE_BYTES, 100 * PIECE_BYTES, 100 * PIECE_BYTES])
    hash_cached = FileStream.hash_cached
    order: list[str] = []

    def note(stream: FileStream, scratch: memoryview, *, limit_bytes: int) -> int:
        order.append(stream.path)
        return hash_cached(stream, scratch, limit_bytes=limit_bytes)

    monkeypatch.setattr(FileStream, "hash_cached", note)
    opened = streams_of(tmp_path, contents)
    for stream in opened:
        stream.open()
    run_streams(opened, threads=1)
    assert order[:300] == ["f000"] * 300
    assert set(order[-6:]) == {"f000", "f001", "f002"}


def test_bytes_land_where_they_are_wanted(tmp_path: Path) -> None:
    contents = make_files(tmp_path, [3 * PIECE_BYTES, 10])
    done = streams_of(tmp_path, contents)
    memory = {stream.path: bytearray(stream.size_bytes) for stream in done}

    def pieces(view: memoryview) -> Iterator[Piece]:
        for begin in range(0, len(view), 700):
            yield [view[begin : begin + 300], view[begin + 300 : begin + 300], view[begin + 300 : begin + 700]]

    for stream in done:
        stream.destination = pieces(memoryview(memory[stream.path]))
    run_streams(done)
    assert memory == contents
    assert digests_of(done) == {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}


def test_a_piece_of_thousands_of_views_is_filled(tmp_path: Path) -> None:
    contents = make_files(tmp_path, [5000])
    (stream,) = streams_of(tmp_path, contents)
    memory = bytearray(5000)
    stream.destination = iter([[memoryview(memory)[at : at + 1] for at in range(5000)]])
    run_streams([stream])
    assert memory == contents["f000"]


def test_a_destination_too_small_is_a_bug_and_not_a_hang(tmp_path: Path) -> None:
    (stream,) = streams_of(tmp_path, make_files(tmp_path, [5000]))
    stream.destination = iter([[memoryview(bytearray(10))]])
    with pytest.raises(ValueError, match="smaller"):
        run_streams([stream])


def test_scratch_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    contents = make_files(tmp_path, [400_000] * 8)
    done = streams_of(tmp_path, contents)
    tracemalloc.start()
    try:
        run_streams(done, threads=2)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 400_000


def test_progress_grows_and_ends_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "REPORT_EVERY_S", 0.0001)
    contents = make_files(tmp_path, [20_000] * 30)
    seen: list[Progress] = []
    callers: set[int] = set()

    def note(progress: Progress) -> None:
        seen.append(progress)
        callers.add(threading.get_ident())

    run_streams(streams_of(tmp_path, contents), on_progress=note)
    assert seen[-1] == Progress(30, 30, 600_000, 600_000)
    assert [progress.bytes_done for progress in seen] == sorted(progress.bytes_done for progress in seen)
    assert callers == {threading.get_ident()}
    assert str(Progress(34, 66, 13207024435, 1)) == "34/66 files, 12.3 GiB"


def test_a_progress_callback_that_raises_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_streams(streams_of(tmp_path, make_files(tmp_path, [20_000] * 30)), on_progress=give_up)


def test_more_files_than_fit_at_once_are_all_read(tmp_path: Path) -> None:
    contents = make_files(tmp_path, [number * 37 for number in range(3 * streams.FILES_IN_FLIGHT)])
    done = streams_of(tmp_path, contents)
    run_streams(done)
    assert digests_of(done) == {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}


def test_a_lone_large_file_gets_all_the_threads_of_blake3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def note(algorithm: str, *, threads: int = 1) -> object:
        asked.append(threads)
        return make_hasher(algorithm, threads=threads)

    monkeypatch.setattr(streams, "make_hasher", note)
    streams_of(tmp_path, {"one": bytes(1000)}, algorithm="blake3", threads=4)
    streams_of(tmp_path, {name: bytes(1000) for name in "abcdefghijkl"}, algorithm="blake3", threads=4)
    assert asked == [4] + [1] * 12


def test_an_unknown_algorithm_is_a_bug() -> None:
    with pytest.raises(ValueError, match="md5"):
        make_hasher("md5")
