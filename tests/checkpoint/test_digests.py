"""Digests of a checkpoint: the manifest they make, and stats taken without opening anything."""

from pathlib import Path

import pytest

from appliance.checkpoint.digests import digest_checkpoint, digest_files, present, stat_files
from appliance.checkpoint.files import IGNORED, find_root
from appliance.errors import ConfigError, TrustError
from tests.checkpoint.checkpoints import make_hub_snapshot
from tests.checkpoint.opened import files_opened


def test_the_manifest_says_what_was_hashed_and_how(checkpoint: Path, tmp_path: Path) -> None:
    manifest = digest_checkpoint(checkpoint)
    assert manifest.name == "checkpoint" and manifest.algorithm == "sha256"
    assert not manifest.allow_symlinks and manifest.ignored == tuple(sorted(IGNORED))
    assert digest_checkpoint(make_hub_snapshot(tmp_path / "hub")).allow_symlinks


def test_algorithms_agree_on_the_files_and_not_on_the_digests(checkpoint: Path) -> None:
    one, other = digest_checkpoint(checkpoint), digest_checkpoint(checkpoint, algorithm="blake3")
    assert one.digests.keys() == other.digests.keys()
    assert not set(one.digests.values()) & set(other.digests.values())


def test_a_directory_without_files_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").touch()
    with pytest.raises(ConfigError, match="has no files"):
        digest_checkpoint(tmp_path)


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    root = find_root(checkpoint)
    for path in ("gone", "tokenizer", "config.json/below"):
        with pytest.raises(TrustError, match=f"{path} is missing or is not a regular file"):
            digest_files(root, ["config.json", path], algorithm="sha256")


def test_a_digest_that_is_not_the_expected_one_is_named(checkpoint: Path) -> None:
    root = find_root(checkpoint)
    digests = dict(digest_checkpoint(root).digests)
    assert set(digest_files(root, digests, algorithm="sha256", expected=digests)) == set(digests)
    with pytest.raises(TrustError, match=r"config\.json is not the file"):
        digest_files(root, digests, algorithm="sha256", expected={**digests, "config.json": "0" * 64})


def test_stats_open_nothing_and_say_what_is_not_there(checkpoint: Path) -> None:
    root = find_root(checkpoint)
    paths = [*digest_checkpoint(root).digests, "gone", "tokenizer"]
    with files_opened(checkpoint) as opened:
        stats = stat_files(root, paths)
    assert opened == [] and list(stats) == paths
    assert [path for path, stat in stats.items() if stat is None] == ["gone", "tokenizer"]
    with pytest.raises(TrustError, match="gone"):
        present(root, stats)
    assert stat_files(root, []) == {}
