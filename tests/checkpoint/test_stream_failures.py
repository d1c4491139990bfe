"""Files that change while they are read, are not what was expected, or cannot be read: each is named."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.checkpoint import streams
from appliance.checkpoint.file_stream import FileStream
from appliance.checkpoint.files import find_root
from appliance.checkpoint.streams import make_streams, run_streams
from appliance.errors import ResourceError, TrustError
from tests.checkpoint.numbered import PIECE_BYTES, make_files, streams_of

pytestmark = pytest.mark.usefixtures("stream_pieces")


@pytest.mark.parametrize("threads", [1, 7], ids=["hashed by who reads it", "read ahead"])
class TestChanges:
    """What happens to a file between its opening and its last byte is noticed."""

    def change(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, change: Callable[[Path], None]
    ) -> None:
        contents = make_files(tmp_path, [5 * PIECE_BYTES] * 3)
        file = tmp_path / "f001"
        wait_for_a_tick(file)
        inode, real = file.stat().st_ino, os.preadv
        changed: list[bool] = []

        def read_and_change_once(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            count = real(fd, buffers, offset, flags)
            if not changed and os.fstat(fd).st_ino == inode:
                changed.append(True)
                change(file)
            return count

        monkeypatch.setattr(os, "preadv", read_and_change_once)
        run_streams(streams_of(tmp_path, contents), threads=threads)

    def test_rewritten_in_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        with pytest.raises(TrustError, match=r"f001 changed while it was read \(mtime_ns, ctime_ns\)"):
            self.change(tmp_path, monkeypatch, threads, lambda file: write_at(file, 4 * PIECE_BYTES))

    def test_rewritten_with_its_old_time_put_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
    ) -> None:
        def rewrite(file: Path) -> None:
            status = file.stat()
            write_at(file, 0)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

        with pytest.raises(TrustError, match=r"f001 changed while it was read \(ctime_ns\)"):
            self.change(tmp_path, monkeypatch, threads, rewrite)

    def test_cut_short(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        with pytest.raises(TrustError, match="f001 was cut short"):
            self.change(tmp_path, monkeypatch, threads, lambda file: os.truncate(file, PIECE_BYTES))

    def test_grown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        with pytest.raises(TrustError, match=r"f001 changed while it was read \(size_bytes"):
            self.change(tmp_path, monkeypatch, threads, lambda file: os.truncate(file, 9 * PIECE_BYTES))

    def test_another_file_renamed_over_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        # What is open stays what it is, but its link count changes, and with it the time of its last change.
        def replace(file: Path) -> None:
            (file.parent / "new").write_bytes(b"x" * 5 * PIECE_BYTES)
            (file.parent / "new").replace(file)

        with pytest.raises(TrustError, match="f001 changed while it was read"):
            self.change(tmp_path, monkeypatch, threads, replace)

    def test_another_size_than_when_it_was_listed(self, tmp_path: Path, threads: int) -> None:
        done = streams_of(tmp_path, make_files(tmp_path, [500] * 3))
        os.truncate(tmp_path / "f002", 499)
        with pytest.raises(TrustError, match="f002 changed size"):
            run_streams(done, threads=threads)

    def test_gone(self, tmp_path: Path, threads: int) -> None:
        done = streams_of(tmp_path, make_files(tmp_path, [500] * 3))
        (tmp_path / "f002").unlink()
        with pytest.raises(TrustError, match="f002 is missing"):
            run_streams(done, threads=threads)


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
