"""A file written whole or not at all."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from appliance.checkpoint.durable_file import write_durably
from appliance.errors import ApplianceError, ConfigError, HostError, ResourceError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_has_its_bytes_and_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        write_durably(tmp_path / "file", b"data", mode=0o644, replace=False)
    finally:
        os.umask(previous)
    assert (tmp_path / "file").read_bytes() == b"data"
    assert mode_of(tmp_path / "file") == 0o644
    assert names(tmp_path) == ["file"]


def test_without_replace_an_older_file_stays(tmp_path: Path) -> None:
    for name, old in (("file", b"old"), ("link", None)):
        path = tmp_path / name
        if old is None:
            path.symlink_to("gone")
        else:
            path.write_bytes(old)
        with pytest.raises(ConfigError, match=f"{name} is already there"):
            write_durably(path, b"new", mode=0o600, replace=False)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file", "link"]


def test_with_replace_a_link_gives_way_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    (tmp_path / "file").symlink_to("blob")
    write_durably(tmp_path / "file", b"new", mode=0o644, replace=True)
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "blob").read_bytes() == b"blob"
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([value]) * 100_000 for value in range(2)]
    path.write_bytes(contents[0])
    stop = threading.Event()
    odd: list[bytes] = []

    def read() -> None:
        while not stop.is_set():
            data = path.read_bytes()
            if data not in contents:
                odd.append(data[:10])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        write_durably(path, contents[number % 2], mode=0o644, replace=True)
    stop.set()
    reader.join()
    assert odd == []


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, ResourceError), (errno.EIO, HostError), (errno.EROFS, ConfigError)]
)
def test_a_failure_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[ApplianceError]
) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    for broken in ("write", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, fail)
            with pytest.raises(kind, match=r"cannot write .*file"):
                write_durably(tmp_path / "file", b"new", mode=0o644, replace=True)
        assert (tmp_path / "file").read_bytes() == b"old"
        assert names(tmp_path) == ["file"]


def test_a_directory_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        write_durably(tmp_path / "none" / "file", b"", mode=0o600, replace=True)
