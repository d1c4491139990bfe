"""A stat record: when two are the same, and what is accepted as one."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.checkpoint.stat_record import FileStat
from appliance.errors import PeerError


def test_reading_a_file_leaves_its_stat_the_same(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    before = FileStat.take(file)
    assert before is not None and before.size_bytes == 100
    file.read_bytes()
    assert FileStat.take(file) == before
    with file.open("rb") as opened:
        assert FileStat.take(opened.fileno()) == before


def test_rewriting_touching_and_replacing_a_file_change_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a")
    first = FileStat.take(file)
    assert first is not None
    os.utime(file, ns=(first.mtime_ns, first.mtime_ns - 10**9))
    touched = FileStat.take(file)
    assert touched is not None and "mtime_ns" in first.differing(touched)
    other = tmp_path / "other"
    other.write_bytes(b"a")
    os.utime(other, ns=(first.mtime_ns, first.mtime_ns))
    other.replace(file)
    replaced = FileStat.take(file)
    assert replaced is not None and "inode" in first.differing(replaced)
    assert replaced.mtime_ns == first.mtime_ns


def test_every_field_counts() -> None:
    stat = FileStat(1, 2, 3, 4, 5)
    assert stat.differing(stat) == ()
    for name in ("device", "inode", "size_bytes", "mtime_ns", "ctime_ns"):
        assert stat.differing(replace(stat, **{name: 9})) == (name,)


def test_what_is_no_regular_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("gone")
    for path in (tmp_path, tmp_path / "gone", tmp_path / "pipe", tmp_path / "link", tmp_path / "file" / "below"):
        assert FileStat.take(path) is None
    (tmp_path / "good").symlink_to("file")
    assert FileStat.take(tmp_path / "good") == FileStat.take(tmp_path / "file")


def test_it_survives_json_and_nothing_else_does(tmp_path: Path) -> None:
    stat = FileStat(1, 2, 3, -4, 2**63)
    assert FileStat.from_json(stat.to_json()) == stat
    assert FileStat.from_json(list(stat.to_json())) == stat
    wrongs: list[object] = [
        None,
        1,
        "12345",
        {},
        [],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, "5"],
        [1, 2, 3, 4, 5.0],
        [True] * 5,
    ]
    for wrong in wrongs:
        with pytest.raises(PeerError):
            FileStat.from_json(wrong)
    with pytest.raises(PeerError):
        FileStat.from_json([1, 2, 3, 4, 2**64])
