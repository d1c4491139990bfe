"""Files read side by side: the right digests, bounded memory, changes noticed, failures that stop the rest."""

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
from appliance.checkpoint.files import find_root
from appliance.checkpoint.streams import Progress, make_streams, run_streams
from appliance.errors import ResourceError, TrustError
from tests.checkpoint.checkpoints import noise

PIECE_BYTES = 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file many pieces long."""
    monkeypatch.setattr(streams, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(streams, "_QUANTUM_BYTES", 4 * PIECE_BYTES)
    monkeypatch.setattr(streams, "_SMALL_BYTES", PIECE_BYTES // 10)


def make_files(folder: Path, sizes_bytes: list[int]) -> dict[str, bytes]:
    contents = {f"f{number:03}": noise(f"f{number}", size) for number, size in enumerate(sizes_bytes)}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return contents


def streams_of(
    folder: Path, contents: dict[str, bytes], *, algorithm: str = "sha256", threads: int | None = None
) -> list[FileStream]:
    sizes = {name: len(data) for name, data in contents.items()}
    return make_streams(find_root(folder), sizes, algorithm=algorithm, threads=threads)


def digests_of(done: list[FileStream]) -> dict[str, str]:
    return {stream.path: stream.outcome.digest for stream in done if stream.outcome}


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
    hash_piece = FileStream.hash
    order: list[str] = []

    def note(stream: FileStream, piece: Piece) -> None:
        order.append(stream.path)
        hash_piece(stream, piece)

    monkeypatch.setattr(FileStream, "hash", note)
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


class TestChanges:
    """What happens to a file between its opening and its last byte is noticed."""

    def change(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]) -> None:
        contents = make_files(tmp_path, [5 * PIECE_BYTES] * 3)
        file = tmp_path / "f001"
        wait_for_a_tick(file)
        real = FileStream.hash
        changed: list[bool] = []

        def change_once(stream: FileStream, piece: Piece) -> None:
            real(stream, piece)
            if stream.path == "f001" and not changed:
                changed.append(True)
                change(file)

        monkeypatch.setattr(FileStream, "hash", change_once)
        run_streams(streams_of(tmp_path, contents))

    def test_rewritten_in_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(TrustError, match=r"f001 changed while it was read \(mtime_ns, ctime_ns\)"):
            self.change(tmp_path, monkeypatch, lambda file: write_at(file, 4 * PIECE_BYTES))

    def test_rewritten_with_its_old_time_put_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def rewrite(file: Path) -> None:
            status = file.stat()
            write_at(file, 0)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

        with pytest.raises(TrustError, match=r"f001 changed while it was read \(ctime_ns\)"):
            self.change(tmp_path, monkeypatch, rewrite)

    def test_cut_short(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(TrustError, match="f001 was cut short"):
            self.change(tmp_path, monkeypatch, lambda file: os.truncate(file, PIECE_BYTES))

    def test_grown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(TrustError, match=r"f001 changed while it was read \(size_bytes"):
            self.change(tmp_path, monkeypatch, lambda file: os.truncate(file, 9 * PIECE_BYTES))

    def test_another_file_renamed_over_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # What is open stays what it is, but its link count changes, and with it the time of its last change.
        def replace(file: Path) -> None:
            (file.parent / "new").write_bytes(b"x" * 5 * PIECE_BYTES)
            (file.parent / "new").replace(file)

        with pytest.raises(TrustError, match="f001 changed while it was read"):
            self.change(tmp_path, monkeypatch, replace)

    def test_another_size_than_when_it_was_listed(self, tmp_path: Path) -> None:
        done = streams_of(tmp_path, make_files(tmp_path, [500] * 3))
        os.truncate(tmp_path / "f002", 499)
        with pytest.raises(TrustError, match="f002 changed size"):
            run_streams(done)

    def test_gone(self, tmp_path: Path) -> None:
        done = streams_of(tmp_path, make_files(tmp_path, [500] * 3))
        (tmp_path / "f002").unlink()
        with pytest.raises(TrustError, match="f002 is missing"):
            run_streams(done)


def test_a_wrong_digest_stops_the_rest_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = make_files(tmp_path, [10 * PIECE_BYTES] + [PIECE_BYTES] * 100)
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    expected["f000"] = "0" * 64
    sizes = {name: len(data) for name, data in contents.items()}
    done = make_streams(find_root(tmp_path), sizes, algorithm="sha256", expected=expected)
    failed = threading.Event()
    open_file, stop = FileStream.open, streams._Work._stop

    def wait_for_the_failure(stream: FileStream) -> None:
        open_file(stream)
        if stream.path != "f000":
            assert failed.wait(30)

    def stop_and_tell(work: streams._Work, error: BaseException | None) -> None:
        stop(work, error)
        failed.set()

    monkeypatch.setattr(FileStream, "open", wait_for_the_failure)
    monkeypatch.setattr(streams._Work, "_stop", stop_and_tell)
    with pytest.raises(TrustError, match="f000 is not the file that was signed or pinned") as caught:
        run_streams(done)
    assert "0000000000000000..." in str(caught.value)
    assert [stream.path for stream in done if stream.outcome] == []


def test_expecting_nothing_of_a_file_is_a_bug_not_a_pass(tmp_path: Path) -> None:
    contents = make_files(tmp_path, [500])
    with pytest.raises(KeyError):
        make_streams(find_root(tmp_path), {"f000": len(contents["f000"])}, algorithm="sha256", expected={})


def test_a_disk_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(Exception, match=r"cannot read .*f00\d: Input/output error"):
        run_streams(streams_of(tmp_path, make_files(tmp_path, [500] * 3)))


def test_running_out_of_descriptors_is_a_resource_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(24, "Too many open files")

    done = streams_of(tmp_path, make_files(tmp_path, [500] * 3))
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ResourceError, match="Too many open files"):
        run_streams(done)


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


def write_at(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(b"changed")


def wait_for_a_tick(file: Path) -> None:
    """Wait until a change of the file would get another time than it has: some kernels' clocks tick every 4 ms."""
    probe = file.parent / "probe"
    probe.touch()
    while probe.stat().st_ctime_ns <= file.stat().st_ctime_ns:
        probe.touch()
    probe.unlink()
