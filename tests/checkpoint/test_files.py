"""The files of a checkpoint: which are found, which are refused, and what may be opened."""

import os
import socket
from pathlib import Path

import pytest

from appliance.checkpoint.files import (
    MAX_DEPTH,
    MAX_FILES,
    CheckpointRoot,
    find_root,
    is_ignored,
    list_files,
    locate,
    open_file,
    path_fault,
)
from appliance.errors import ConfigError, TrustError
from tests.checkpoint.checkpoints import CONFIG, make_checkpoint, make_hub_snapshot
from tests.checkpoint.opened import files_opened


def paths(checkpoint: Path) -> list[str]:
    return [file.path for file in list_files(find_root(checkpoint))]


class TestRoot:
    def test_a_link_to_the_checkpoint_is_resolved(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "current").symlink_to("checkpoint")
        assert find_root(tmp_path / "current") == find_root(checkpoint) == CheckpointRoot(checkpoint, checkpoint)

    def test_a_hub_snapshot_may_link_anywhere_in_its_own_repository(self, tmp_path: Path) -> None:
        snapshot = make_hub_snapshot(tmp_path)
        assert find_root(snapshot).boundary == tmp_path / "models--acme--tiny"
        assert find_root(snapshot / "tokenizer").boundary == tmp_path / "models--acme--tiny"

    def test_a_directory_that_only_looks_like_a_hub_snapshot_may_not(self, tmp_path: Path) -> None:
        for name in ("other/snapshots/1", "models--a/1", "snapshots/1"):
            folder = tmp_path / name
            folder.mkdir(parents=True)
            assert find_root(folder).boundary == folder

    def test_what_is_no_directory_is_a_config_error(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "circle").symlink_to("circle")
        for path in (
            checkpoint / "config.json",
            tmp_path / "missing",
            tmp_path / "circle",
            tmp_path / "nul\0",
            checkpoint / "config.json" / "below",
        ):
            with pytest.raises(ConfigError, match="checkpoint"):
                find_root(path)

    def test_a_path_that_would_garble_a_message_is_refused(self, tmp_path: Path) -> None:
        for name in ("line\nbreak", os.fsdecode(b"not-utf8-\xff")):
            (tmp_path / name).mkdir()
            with pytest.raises(ConfigError, match="unprintable"):
                find_root(tmp_path / name)


class TestListing:
    def test_it_names_every_file_sorted_with_its_size(self, checkpoint: Path) -> None:
        files = list_files(find_root(checkpoint))
        assert [file.path for file in files] == [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer/tokenizer.json",
            "training_args.bin",
        ]
        assert files[0].size_bytes == len(CONFIG)
        assert not any(file.is_link for file in files)

    def test_signature_and_bookkeeping_are_left_out_at_the_top_only(self, checkpoint: Path) -> None:
        before = paths(checkpoint)
        for name in (
            ".git/config",
            ".github/x",
            ".cache/huggingface/a/b.lock",
            "model.sig",
            ".gitignore",
            ".gitattributes",
        ):
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (checkpoint / name).touch()
        assert paths(checkpoint) == before
        for name in ("sub/.git/config", "sub/model.sig", ".gitmodules", ".cache/other"):
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (checkpoint / name).touch()
        assert set(paths(checkpoint)) - set(before) == {
            "sub/.git/config",
            "sub/model.sig",
            ".gitmodules",
            ".cache/other",
        }

    def test_a_hub_snapshot_lists_as_the_plain_checkpoint_does(self, tmp_path: Path) -> None:
        plain = list_files(find_root(make_checkpoint(tmp_path / "again")))
        linked = list_files(find_root(make_hub_snapshot(tmp_path)))
        assert [(file.path, file.size_bytes) for file in linked] == [(file.path, file.size_bytes) for file in plain]
        assert all(file.is_link for file in linked)

    def test_a_link_inside_the_checkpoint_is_a_file(self, checkpoint: Path) -> None:
        (checkpoint / "same.json").symlink_to("tokenizer/../config.json")
        assert "same.json" in paths(checkpoint)

    @pytest.mark.parametrize("target", ["../outside", "/etc/hostname", "tokenizer/../../outside", "{root}/../outside"])
    def test_a_link_that_leads_out_is_refused_by_name(self, checkpoint: Path, target: str) -> None:
        (checkpoint.parent / "outside").write_text("secret")
        (checkpoint / "leak.json").symlink_to(target.format(root=checkpoint))
        with pytest.raises(TrustError, match=r"leak\.json is a link that leads out"):
            list_files(find_root(checkpoint))

    def test_a_link_out_through_another_link_is_refused(self, checkpoint: Path) -> None:
        (checkpoint.parent / "outside").write_text("secret")
        (checkpoint / "a").symlink_to("b")
        (checkpoint / "b").symlink_to("../outside")
        with pytest.raises(TrustError, match="leads out"):
            list_files(find_root(checkpoint))

    def test_a_hub_link_into_another_repository_is_refused(self, tmp_path: Path) -> None:
        snapshot = make_hub_snapshot(tmp_path)
        other = tmp_path / "models--evil--tiny" / "blobs" / "x"
        other.parent.mkdir(parents=True)
        other.touch()
        (snapshot / "x").symlink_to("../../../models--evil--tiny/blobs/x")
        with pytest.raises(TrustError, match=r"x is a link that leads out of .*models--acme--tiny"):
            list_files(find_root(snapshot))

    def test_a_boundary_is_whole_names_not_a_prefix(self, tmp_path: Path) -> None:
        checkpoint = make_checkpoint(tmp_path / "model")
        (tmp_path / "model-secret").touch()
        (checkpoint / "x").symlink_to("../model-secret")
        with pytest.raises(TrustError, match="leads out"):
            list_files(find_root(checkpoint))

    def test_links_to_nowhere_in_circles_and_to_directories_are_refused(self, checkpoint: Path) -> None:
        for target, reason in (("gone", "leads nowhere"), ("link", "circle"), ("tokenizer", "link to a directory")):
            (checkpoint / "link").symlink_to(target)
            with pytest.raises(TrustError, match=f"link .*{reason}"):
                list_files(find_root(checkpoint))
            (checkpoint / "link").unlink()

    def test_pipes_and_sockets_are_refused(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.mkfifo(checkpoint / "pipe")
        with pytest.raises(TrustError, match="pipe is not a regular file"):
            list_files(find_root(checkpoint))
        (checkpoint / "pipe").unlink()
        monkeypatch.chdir(checkpoint)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("sock")
            with pytest.raises(TrustError, match="sock is not a regular file"):
                list_files(find_root(checkpoint))

    def test_a_name_that_would_garble_a_message_is_refused(self, checkpoint: Path) -> None:
        for name in ("line\nbreak", "escape\x1b[2J", os.fsdecode(b"not-utf8-\xff"), "right\u202eto-left"):
            (checkpoint / name).touch()
            with pytest.raises(TrustError, match="file name"):
                list_files(find_root(checkpoint))
            (checkpoint / name).unlink()

    def test_a_tree_too_deep_is_refused(self, checkpoint: Path) -> None:
        deep = checkpoint.joinpath(*["d"] * (MAX_DEPTH + 1))
        deep.mkdir(parents=True)
        (deep / "file").touch()
        with pytest.raises(TrustError, match=f"{MAX_DEPTH} names"):
            list_files(find_root(checkpoint))

    def test_too_many_files_are_refused(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("appliance.checkpoint.files.MAX_FILES", len(paths(checkpoint)))
        (checkpoint / "one-more").touch()
        with pytest.raises(TrustError, match="more than"):
            list_files(find_root(checkpoint))
        assert MAX_FILES >= 10_000

    def test_no_file_is_opened(self, tmp_path: Path) -> None:
        snapshot = make_hub_snapshot(tmp_path)
        with files_opened(tmp_path) as opened:
            root = find_root(snapshot)
            list_files(root)
            locate(root, "config.json")
        assert opened == []


class TestOpening:
    def test_links_are_followed_within_bounds(self, tmp_path: Path) -> None:
        root = find_root(make_hub_snapshot(tmp_path))
        for path, content in (("config.json", CONFIG), ("tokenizer/tokenizer.json", b'{"version": "1.0"}\n')):
            with open_file(root, path) as descriptor:
                assert os.read(descriptor.fileno(), 100) == content

    @pytest.mark.parametrize(
        "path", ["../outside", "/etc/hostname", "", ".", "tokenizer/../config.json", "a//b", "nul\0"]
    )
    def test_a_path_that_is_no_name_of_a_file_inside_is_refused(self, checkpoint: Path, path: str) -> None:
        (checkpoint.parent / "outside").write_text("secret")
        with pytest.raises(TrustError):
            open_file(find_root(checkpoint), path)

    def test_a_directory_a_pipe_and_nothing_are_refused_without_waiting(self, checkpoint: Path) -> None:
        os.mkfifo(checkpoint / "pipe")
        (checkpoint / "leak").symlink_to("/etc/hostname")
        for path in ("tokenizer", "pipe", "missing", "config.json/below", "leak"):
            with pytest.raises(TrustError, match=path):
                open_file(find_root(checkpoint), path)

    def test_the_descriptor_does_not_reach_child_processes(self, checkpoint: Path) -> None:
        with open_file(find_root(checkpoint), "config.json") as descriptor:
            assert not os.get_inheritable(descriptor.fileno())


def test_ignoring_goes_by_whole_names() -> None:
    assert is_ignored(".git") and is_ignored(".git/config")
    assert not is_ignored(".gitmodules") and not is_ignored("sub/.git") and not is_ignored(".github.json")
    assert is_ignored("a/b/c", ignored=("a/b",)) and not is_ignored("a/bc", ignored=("a/b",))


def test_every_way_of_writing_a_path_but_the_shortest_has_a_fault() -> None:
    for path in ("a", "a/b", "model-00001-of-00002.safetensors", "ünïcode", "with space", "..a", "a..", "-"):
        assert path_fault(path) is None
    for path in ("", ".", "..", "/a", "a/", "a//b", "./a", "a/.", "a/./b", "a/../b", "../a", "a\0", "a\n", "\ud800"):
        assert path_fault(path), path
    assert path_fault("x" * 256) and path_fault("/".join("x" * 1000))
