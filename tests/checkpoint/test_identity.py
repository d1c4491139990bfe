"""An identity opens one file or none; pins hold what was first seen; findings name what is wrong."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.checkpoint.files import find_root
from appliance.checkpoint.findings import NAMED_AT_MOST, Findings, check_all, check_listing
from appliance.checkpoint.identity import UNSIGNED, Identity, Trust, check_files, check_stats, identify
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import PrivateKey
from appliance.checkpoint.pins import Pins
from appliance.checkpoint.signature import sign
from appliance.checkpoint.stat_record import FileStat
from appliance.errors import ConfigError, TrustError
from tests.checkpoint.checkpoints import MUTATIONS, flip_a_byte, make_checkpoint, make_hub_snapshot
from tests.checkpoint.opened import files_opened

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def signed(checkpoint: Path, private_key: PrivateKey, keyring: Keyring) -> Identity:
    sign(checkpoint, private_key)
    return identify(checkpoint, Trust.signed(keyring))


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def pinned(checkpoint: Path, state_dir: Path) -> Identity:
    return identify(checkpoint, Trust.local(state_dir))


def stats_of(identity: Identity) -> dict[str, FileStat]:
    return check_files(identity, identity.manifest.digests)


class TestSigned:
    def test_it_opens_the_signature_and_nothing_else_however_many_shards(
        self, checkpoint: Path, private_key: PrivateKey, keyring: Keyring
    ) -> None:
        for number in range(66):
            (checkpoint / f"more-{number:05}.safetensors").write_bytes(b"x")
        manifest = sign(checkpoint, private_key)
        recorded = stats_of(identify(checkpoint, Trust.signed(keyring)))
        with files_opened(checkpoint) as opened:
            identity = identify(checkpoint, Trust.signed(keyring))
            assert check_stats(identity, recorded) == ()
            assert not check_listing(identity)
        assert opened == ["model.sig"]
        assert len(identity.manifest.files) == 72 and identity.root_digest == manifest.root_digest

    def test_it_names_who_signed(self, signed: Identity, private_key: PrivateKey) -> None:
        assert signed.signer == "release" and signed.is_signed
        assert signed.fingerprint == private_key.public.fingerprint

    def test_a_pin_does_not_stand_in_for_a_signature(self, checkpoint: Path, state_dir: Path, keyring: Keyring) -> None:
        identify(checkpoint, Trust.local(state_dir))
        with pytest.raises(TrustError, match="is not signed"):
            identify(checkpoint, Trust.signed(keyring))

    def test_a_trust_in_nothing_is_a_bug(self, checkpoint: Path) -> None:
        with pytest.raises(ValueError, match="keyring or pins"):
            identify(checkpoint, Trust())


class TestPinned:
    def test_the_first_look_hashes_and_the_next_opens_no_file(self, checkpoint: Path, state_dir: Path) -> None:
        trust = Trust.local(state_dir)
        with files_opened(checkpoint) as opened:
            first = identify(checkpoint, trust)
        assert len(opened) == 6
        recorded = stats_of(first)
        with files_opened(checkpoint) as opened:
            second = identify(checkpoint, trust)
            assert check_stats(second, recorded) == ()
        assert opened == []
        assert second == first
        assert second.signer == UNSIGNED == "unsigned" and not second.is_signed

    def test_a_signature_lying_there_is_not_believed_and_no_obstacle(
        self, checkpoint: Path, state_dir: Path, private_key: PrivateKey
    ) -> None:
        first = identify(checkpoint, Trust.local(state_dir))
        sign(checkpoint, private_key)
        second = identify(checkpoint, Trust.local(state_dir))
        assert second.signer == "unsigned" and second.root_digest == first.root_digest
        assert not check_all(second)

    def test_a_change_is_refused_by_name_until_the_operator_pins_again(
        self, checkpoint: Path, state_dir: Path, pinned: Identity
    ) -> None:
        flip_a_byte(checkpoint / "config.json")
        again = identify(checkpoint, Trust.local(state_dir))
        assert again.root_digest == pinned.root_digest
        with pytest.raises(TrustError, match=r"not what was pinned: changed: config\.json") as caught:
            check_all(again).require_none(again)
        assert "pin it again" in str(caught.value)
        manifest = Pins.below(state_dir).repin(checkpoint)
        third = identify(checkpoint, Trust.local(state_dir))
        assert third.manifest == manifest and third.root_digest != pinned.root_digest
        assert not check_all(third)

    @as_root
    def test_what_root_pins_is_the_state_directorys_owners(self, checkpoint: Path, state_dir: Path) -> None:
        state_dir.mkdir()
        os.chown(state_dir, 65534, 65533)
        pins = Pins.below(state_dir)
        # As an earlier release left it.
        pins.directory.mkdir(mode=0o750)
        pins.repin(checkpoint)
        for path in (pins.directory, pins.path(checkpoint)):
            assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65533)
        assert stat.S_IMODE(pins.path(checkpoint).stat().st_mode) == 0o640

    @as_root
    def test_a_link_in_place_of_the_pins_gives_nothing_away(
        self, checkpoint: Path, state_dir: Path, tmp_path: Path
    ) -> None:
        state_dir.mkdir()
        os.chown(state_dir, 65534, 65534)
        (tmp_path / "others").mkdir()
        (state_dir / "pins").symlink_to(tmp_path / "others")
        with pytest.raises(ConfigError, match="pins"):
            Pins.below(state_dir).repin(checkpoint)
        assert (tmp_path / "others").stat().st_uid == 0 and list((tmp_path / "others").iterdir()) == []

    def test_the_pin_belongs_to_the_real_path(self, checkpoint: Path, state_dir: Path, tmp_path: Path) -> None:
        pins = Pins.below(state_dir)
        (tmp_path / "current").symlink_to("checkpoint")
        assert pins.path(tmp_path / "current") == pins.path(checkpoint)
        other = make_checkpoint(tmp_path / "other")
        assert pins.path(other) != pins.path(checkpoint)
        pins.pin(checkpoint)
        pins.path(other).write_bytes(pins.path(checkpoint).read_bytes())
        with pytest.raises(TrustError, match="is a pin of"):
            pins.load(other)

    def test_a_hub_snapshot_is_pinned_by_revision(self, tmp_path: Path, state_dir: Path) -> None:
        snapshot = make_hub_snapshot(tmp_path / "hub")
        identity = identify(snapshot, Trust.local(state_dir))
        assert identity.manifest.allow_symlinks and not check_all(identity)
        later = snapshot.parent / "4567cdef"
        later.mkdir()
        (later / "config.json").write_text("{}")
        assert identify(later, Trust.local(state_dir)).root_digest != identity.root_digest

    def test_the_algorithm_is_that_of_the_first_look(self, checkpoint: Path, state_dir: Path) -> None:
        first = identify(checkpoint, Trust.local(state_dir), algorithm="blake3")
        second = identify(checkpoint, Trust.local(state_dir), algorithm="sha256")
        assert first.manifest.algorithm == second.manifest.algorithm == "blake3"
        assert not check_all(second)

    def test_who_pins_first_wins(self, checkpoint: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pins = Pins.below(state_dir)
        real = Pins.load
        seen: list[object] = []

        def somebody_is_faster(self: Pins, root: Path) -> object:
            found = real(self, root)
            if not seen:
                seen.append(found)
                monkeypatch.setattr(Pins, "load", real)
                pins.repin(checkpoint, algorithm="blake3")
            return found

        monkeypatch.setattr(Pins, "load", somebody_is_faster)
        assert pins.pin(checkpoint, algorithm="sha256").algorithm == "blake3"

    def test_only_owner_and_group_may_read_it_and_nobody_else_may_have_written_it(
        self, checkpoint: Path, state_dir: Path, pinned: Identity
    ) -> None:
        path = Pins.below(state_dir).path(checkpoint)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o666)
        with pytest.raises(TrustError, match="everybody may write it"):
            identify(checkpoint, Trust.local(state_dir))

    def test_what_is_no_plain_file_is_no_pin(self, checkpoint: Path, state_dir: Path, pinned: Identity) -> None:
        path = Pins.below(state_dir).path(checkpoint)
        data = path.read_bytes()
        path.unlink()
        (state_dir / "elsewhere").write_bytes(data)
        makers: list[Callable[[], object]] = [
            lambda: path.symlink_to(state_dir / "elsewhere"),
            lambda: os.mkfifo(path),
            path.mkdir,
        ]
        for make in makers:
            make()
            with pytest.raises(TrustError, match="pin "):
                identify(checkpoint, Trust.local(state_dir))
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()

    def test_a_damaged_pin_is_never_taken_for_no_pin(self, checkpoint: Path, state_dir: Path, pinned: Identity) -> None:
        path = Pins.below(state_dir).path(checkpoint)
        good = path.read_bytes()
        for at in range(0, len(good), 3):
            for data in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
                path.write_bytes(data)
                try:
                    found = Pins.below(state_dir).load(checkpoint)
                except TrustError as error:
                    assert "pin " in str(error)
                else:
                    assert found is not None and found.root_digest == pinned.root_digest

    def test_a_pin_with_a_field_changed_added_or_gone_is_refused(
        self, checkpoint: Path, state_dir: Path, pinned: Identity
    ) -> None:
        path = Pins.below(state_dir).path(checkpoint)
        good = json.loads(path.read_bytes())
        wrong: dict[str, object] = {
            "v": 2,
            "checkpoint": "/elsewhere",
            "algorithm": "blake3",
            "allow_symlinks": "no",
            "files": {**good["files"], "extra": "0" * 64},
            "root_digest": "0" * 64,
            "later": 1,
        }
        for name, value in wrong.items():
            path.write_text(json.dumps({**good, name: value}))
            with pytest.raises(TrustError, match="pin "):
                Pins.below(state_dir).load(checkpoint)
        for name in good:
            path.write_text(json.dumps({key: value for key, value in good.items() if key != name}))
            with pytest.raises(TrustError, match="pin "):
                Pins.below(state_dir).load(checkpoint)

    def test_a_state_directory_that_cannot_be_made_is_a_config_error(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="Not a directory"):
            identify(checkpoint, Trust.local(tmp_path / "file"))


class TestStats:
    def test_each_mutation_shows_in_the_stat_and_is_refused_by_hash(self, tmp_path: Path, state_dir: Path) -> None:
        for number, (name, mutate) in enumerate(MUTATIONS.items()):
            checkpoint = make_checkpoint(tmp_path / str(number))
            identity = identify(checkpoint, Trust.local(state_dir))
            recorded = stats_of(identity)
            mutate(checkpoint / SHARD)
            assert check_stats(identity, recorded) == (SHARD,), name
            with pytest.raises(TrustError, match=SHARD):
                check_files(identity, [SHARD])
            assert SHARD not in check_files(identity, ["config.json"])

    def test_a_file_written_again_with_the_same_bytes_is_accepted_after_hashing(self, pinned: Identity) -> None:
        recorded = stats_of(pinned)
        path = pinned.root.path / SHARD
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        assert check_stats(pinned, recorded) == (SHARD,)
        recorded |= check_files(pinned, [SHARD])
        assert check_stats(pinned, recorded) == ()

    def test_a_file_that_was_never_recorded_counts_as_changed(self, pinned: Identity) -> None:
        recorded = stats_of(pinned)
        del recorded["config.json"]
        recorded["not-in-the-manifest"] = recorded[SHARD]
        assert check_stats(pinned, recorded) == ("config.json",)
        assert len(check_stats(pinned, {})) == 6

    def test_a_link_turned_to_another_blob_shows(self, tmp_path: Path, state_dir: Path) -> None:
        snapshot = make_hub_snapshot(tmp_path / "hub")
        identity = identify(snapshot, Trust.local(state_dir))
        recorded = stats_of(identity)
        link = snapshot / "config.json"
        link.unlink()
        link.symlink_to(f"../../blobs/{(snapshot / SHARD).readlink().name}")
        assert check_stats(identity, recorded) == ("config.json",)
        with pytest.raises(TrustError, match=r"config\.json is not the file"):
            check_files(identity, ["config.json"])
        link.unlink()
        link.symlink_to("/etc/hostname")
        with pytest.raises(TrustError, match=r"config\.json is a link that leads out"):
            check_files(identity, ["config.json"])

    def test_a_file_outside_the_manifest_cannot_be_checked(self, pinned: Identity) -> None:
        with pytest.raises(TrustError, match="not in its manifest"):
            check_files(pinned, ["../elsewhere"])
        assert check_files(pinned, []) == {}


class TestFindings:
    def test_three_lists_at_once(self, signed: Identity) -> None:
        folder = signed.root.path
        flip_a_byte(folder / SHARD)
        (folder / "config.json").unlink()
        (folder / "tokenizer" / "evil.py").touch()
        (folder / "z.safetensors").touch()
        found = check_all(signed)
        assert found == Findings((SHARD,), ("config.json",), ("tokenizer/evil.py", "z.safetensors"))
        assert str(found) == (f"changed: {SHARD}; missing: config.json; extra: tokenizer/evil.py, z.safetensors")
        with pytest.raises(TrustError, match="not what was signed: changed: ") as caught:
            found.require_none(signed)
        assert "have it signed again" in str(caught.value)
        assert check_listing(signed) == Findings(missing=found.missing, extra=found.extra)

    def test_nothing_wrong_is_nothing(self, signed: Identity) -> None:
        found = check_all(signed)
        assert not found and str(found) == "nothing found"
        found.require_none(signed)

    def test_a_long_list_is_cut_and_counted(self, signed: Identity) -> None:
        found = Findings(extra=tuple(f"f{number:04}" for number in range(1000)))
        assert str(found).endswith("f0019 and 980 more")
        assert NAMED_AT_MOST == 20
        worst = Findings(*[tuple("x" * 1000 for _ in range(1000))] * 3)
        with pytest.raises(TrustError) as caught:
            worst.require_none(signed)
        assert len(str(caught.value)) < 15_000

    def test_what_the_signer_ignored_is_not_extra_but_what_was_signed_counts_everywhere(
        self, checkpoint: Path, private_key: PrivateKey, keyring: Keyring
    ) -> None:
        from appliance.checkpoint.digests import digest_files
        from appliance.checkpoint.manifest import make_manifest
        from appliance.checkpoint.signature import sign_manifest

        for name in (".gitattributes", "notes/today"):
            (checkpoint / name).parent.mkdir(exist_ok=True)
            (checkpoint / name).write_text(name)
        root = find_root(checkpoint)
        hashed = digest_files(root, [".gitattributes", "config.json"], algorithm="sha256")
        manifest = make_manifest(
            "tiny",
            "sha256",
            [(path, result.digest) for path, result in hashed.items()],
            ignored=["notes", "tokenizer", "training_args.bin", "model.safetensors.index.json"],
        )
        (checkpoint / "model.sig").write_bytes(sign_manifest(manifest, private_key))
        identity = identify(checkpoint, Trust.signed(keyring))
        assert check_all(identity).extra == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        flip_a_byte(checkpoint / ".gitattributes")
        assert check_all(identity).changed == (".gitattributes",)
        (checkpoint / ".gitattributes").unlink()
        assert check_all(identity).missing == (".gitattributes",)

    def test_a_directory_in_the_place_of_a_file_is_a_missing_file(self, signed: Identity) -> None:
        path = signed.root.path / "config.json"
        path.unlink()
        path.mkdir()
        (path / "inside").touch()
        assert check_all(signed) == Findings(missing=("config.json",), extra=("config.json/inside",))
