"""The folder that vLLM is started on."""

import os
import threading
from pathlib import Path

import pytest

from appliance.checkpoint.files import CheckpointRoot
from appliance.checkpoint.identity import Identity
from appliance.checkpoint.manifest import make_manifest
from appliance.errors import HostError
from appliance.vllm.configs_folder import kept_configs

FILES = {"config.json": b"{}", "tokenizer/vocabulary.json": b"[]"}
ROOT = CheckpointRoot(Path("/nowhere/checkpoint"), Path("/nowhere/checkpoint"))
WEIGHTS = "model.safetensors"
IDENTITY = Identity(ROOT, make_manifest("c", "sha256", [(path, "a" * 64) for path in (*FILES, WEIGHTS)]), "signer")
DIGEST = IDENTITY.root_digest


def contents(folder: Path) -> dict[str, bytes]:
    assert (folder / WEIGHTS).readlink() == ROOT.path / WEIGHTS
    found = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.name != WEIGHTS}


def test_the_folder_holds_exactly_the_configs_and_is_named_by_the_digest(tmp_path: Path) -> None:
    folder = kept_configs(tmp_path, IDENTITY, FILES)
    assert folder == tmp_path / "configs" / DIGEST
    assert contents(folder) == FILES


def test_a_folder_that_is_right_is_left_alone(tmp_path: Path) -> None:
    folder = kept_configs(tmp_path, IDENTITY, FILES)
    before = folder.stat().st_ino
    assert kept_configs(tmp_path, IDENTITY, FILES).stat().st_ino == before


@pytest.mark.parametrize(
    "damage", ["changed", "missing", "added", "linked", "another checkpoint's weights", "no weights"]
)
def test_one_that_somebody_changed_is_made_anew(tmp_path: Path, damage: str) -> None:
    folder = kept_configs(tmp_path, IDENTITY, FILES)
    match damage:
        case "changed":
            (folder / "config.json").write_bytes(b'{"auto_map": 1}')
        case "missing":
            (folder / "config.json").unlink()
        case "added":
            (folder / "modeling_evil.py").write_bytes(b"1")
        case "linked":
            (folder / "more.json").symlink_to("/etc/hostname")
        case "another checkpoint's weights":
            (folder / WEIGHTS).unlink()
            (folder / WEIGHTS).symlink_to("/nowhere/other/model.safetensors")
        case "no weights":
            (folder / WEIGHTS).unlink()
    assert contents(kept_configs(tmp_path, IDENTITY, FILES)) == FILES
    assert [path.name for path in (tmp_path / "configs").iterdir()] == [DIGEST]


def test_many_may_make_it_at_once(tmp_path: Path) -> None:
    found: list[Path | Exception] = []
    gate = threading.Barrier(6)

    def make() -> None:
        gate.wait()
        try:
            found.append(kept_configs(tmp_path, IDENTITY, FILES))
        except HostError as error:
            found.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "configs" / DIGEST] * 6
    assert contents(tmp_path / "configs" / DIGEST) == FILES
    assert [path.name for path in (tmp_path / "configs").iterdir()] == [DIGEST]


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "configs").write_text("in the way")
    with pytest.raises(HostError, match=r"cannot keep configs in .*configs"):
        kept_configs(tmp_path, IDENTITY, FILES)


def test_a_file_in_the_place_of_the_folder_is_named_and_left(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / DIGEST).write_text("in the way")
    with pytest.raises(HostError, match=DIGEST):
        kept_configs(tmp_path, IDENTITY, FILES)
    assert [path.name for path in (tmp_path / "configs").iterdir()] == [DIGEST]


def test_others_than_the_group_may_not_read_it(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        kept_configs(tmp_path, IDENTITY, FILES)
    finally:
        os.umask(previous)
    assert (tmp_path / "configs").stat().st_mode & 0o777 == 0o750
