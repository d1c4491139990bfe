"""A checkpoint is hashed once for all who have to know that it is right, and again as soon as anything changed."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from appliance.checkpoint.identity import Identity, Trust, identify
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import generate_key, load_private_key
from appliance.checkpoint.signature import sign
from appliance.checkpoint.stat_record import FileStat
from appliance.checkpoint.verification import verified_stats, verify_all
from appliance.errors import TrustError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for number in range(3):
        (folder / f"file-{number}").write_bytes(bytes([number]) * 1000)
    generate_key(tmp_path / "signer.key")
    sign(folder, load_private_key(tmp_path / "signer.key"))
    return folder


def identity_of(checkpoint: Path) -> Identity:
    return identify(checkpoint, Trust.signed(Keyring.load([checkpoint.parent / "signer.pub"])))


def test_a_second_look_hashes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    assert verify_all(identity_of(checkpoint), tmp_path / "state")
    read: list[object] = []
    assert not verify_all(identity_of(checkpoint), tmp_path / "state", on_progress=read.append)
    assert read == []


def test_a_touched_file_is_hashed_again(checkpoint: Path, tmp_path: Path) -> None:
    verify_all(identity_of(checkpoint), tmp_path / "state")
    os.utime(checkpoint / "file-1", (1, 1))
    assert verify_all(identity_of(checkpoint), tmp_path / "state")


def test_other_bytes_under_the_old_times_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    verify_all(identity_of(checkpoint), tmp_path / "state")
    file = checkpoint / "file-1"
    stat = file.stat()
    file.write_bytes(b"x" * 1000)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(TrustError, match="changed: file-1"):
        verify_all(identity_of(checkpoint), tmp_path / "state")


def test_an_extra_file_is_refused_though_all_others_are_known(checkpoint: Path, tmp_path: Path) -> None:
    verify_all(identity_of(checkpoint), tmp_path / "state")
    (checkpoint / "more").touch()
    with pytest.raises(TrustError, match="extra: more"):
        verify_all(identity_of(checkpoint), tmp_path / "state")


def test_what_was_refused_is_not_remembered_as_right(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "file-1").write_bytes(b"x")
    for _ in range(2):
        with pytest.raises(TrustError, match="changed: file-1"):
            verify_all(identity_of(checkpoint), tmp_path / "state")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"file-0": 1}', b'{"file-0": [1, 2, 3, 4, 5]}', b"\xff" * 9])
def test_a_damaged_record_only_costs_another_read(checkpoint: Path, tmp_path: Path, damage: bytes) -> None:
    verify_all(identity_of(checkpoint), tmp_path / "state")
    (record,) = (tmp_path / "state" / "verified").iterdir()
    record.write_bytes(damage)
    assert verify_all(identity_of(checkpoint), tmp_path / "state")
    assert not verify_all(identity_of(checkpoint), tmp_path / "state")


def test_without_a_place_to_remember_every_look_hashes(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    assert verify_all(identity_of(checkpoint), tmp_path / "state")
    assert verify_all(identity_of(checkpoint), tmp_path / "state")


def test_of_several_at_once_one_hashes_and_all_get_the_stats(checkpoint: Path, tmp_path: Path) -> None:
    read: list[set[str]] = [set() for _ in range(4)]

    def ask(number: int) -> dict[str, FileStat]:
        def seen(*progress: object) -> None:
            read[number].add(str(progress))

        return verified_stats(identity_of(checkpoint), tmp_path / "state", on_progress=seen)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert [bool(progress) for progress in read].count(True) == 1
    assert all(stats == found[0] for stats in found)
    assert found[0].keys() == {"file-0", "file-1", "file-2"}


def test_without_a_place_for_the_record_it_is_hashed_each_time(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    assert verify_all(identity_of(checkpoint), tmp_path / "state")
    assert verify_all(identity_of(checkpoint), tmp_path / "state")
