"""The real `model_signing`: what it signs we verify, what we sign it verifies, and each refuses one byte changed."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.findings import check_all
from appliance.checkpoint.identity import Trust, identify
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import CURVES, generate_key, load_private_key
from appliance.checkpoint.manifest import ALGORITHMS, Algorithm
from appliance.checkpoint.signature import sign
from appliance.errors import TrustError
from tests.checkpoint.checkpoints import flip_a_byte, make_hub_snapshot

PROGRAM = [sys.executable, "-m", "model_signing"]


class Theirs:
    """The library behind the program, which also does what its command line cannot: BLAKE3."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import model_signing

        self._library: Any = model_signing

    def sign(self, checkpoint: Path, key: Path, *, algorithm: str, links: bool = False) -> None:
        self._library.signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(
            self.hashing(algorithm, links=links)
        ).sign(checkpoint, checkpoint / "model.sig")

    def verify(self, checkpoint: Path, public_key: Path, *, algorithm: str, links: bool = False) -> None:
        """Raises ValueError (theirs) when it does not verify."""
        self._library.verifying.Config().use_elliptic_key_verifier(public_key=public_key).set_hashing_config(
            self.hashing(algorithm, links=links)
        ).verify(checkpoint, checkpoint / "model.sig")

    def verify_by_what_the_signature_says(self, checkpoint: Path, public_key: Path) -> None:
        """Lets their library find algorithm, links and ignored paths in the signature."""
        self._library.verifying.Config().use_elliptic_key_verifier(public_key=public_key).verify(
            checkpoint, checkpoint / "model.sig"
        )

    def digests(self, checkpoint: Path, *, algorithm: str) -> dict[str, str]:
        found = self.hashing(algorithm).hash(checkpoint).resource_descriptors()
        return {item.identifier: item.digest.digest_hex for item in found}

    def hashing(self, algorithm: str, *, links: bool = False) -> Any:
        config = self._library.hashing.Config().use_file_serialization(hashing_algorithm=algorithm)
        return config.set_ignored_paths(paths=["model.sig"]).set_allow_symlinks(links)


@pytest.fixture(scope="module")
def theirs() -> Theirs:
    return Theirs()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    generate_key(tmp_path / "pair.key")
    return tmp_path / "pair.key", tmp_path / "pair.pub"


def we_find_nothing(checkpoint: Path, public_key: Path) -> bool:
    return not check_all(identify(checkpoint, Trust.signed(Keyring.load([public_key]))))


def run(*arguments: str | Path, succeeds: bool = True) -> str:
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    return done.stdout + done.stderr


class TestProgram:
    def test_what_it_signs_we_verify(self, checkpoint: Path, pair: tuple[Path, Path]) -> None:
        private, public = pair
        run("sign", "key", checkpoint, "--signature", checkpoint / "model.sig", "--private_key", private)
        assert we_find_nothing(checkpoint, public)
        flip_a_byte(checkpoint / "config.json")
        found = check_all(identify(checkpoint, Trust.signed(Keyring.load([public]))))
        assert found.changed == ("config.json",)

    def test_what_we_sign_it_verifies(self, checkpoint: Path, pair: tuple[Path, Path]) -> None:
        private, public = pair
        sign(checkpoint, load_private_key(private))
        arguments = ("verify", "key", checkpoint, "--signature", checkpoint / "model.sig", "--public_key", public)
        assert "succeeded" in run(*arguments)
        flip_a_byte(checkpoint / "model-00001-of-00002.safetensors")
        assert "Hash mismatch for 'model-00001-of-00002.safetensors'" in run(*arguments, succeeds=False)

    def test_a_hub_snapshot_both_ways(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        private, public = pair
        snapshot = make_hub_snapshot(tmp_path / "hub")
        files = ("--signature", snapshot / "model.sig", "--allow_symlinks")
        sign(snapshot, load_private_key(private))
        run("verify", "key", snapshot, *files, "--public_key", public)
        (snapshot / "model.sig").unlink()
        run("sign", "key", snapshot, *files, "--private_key", private)
        assert we_find_nothing(snapshot, public)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestLibrary:
    def test_digests_are_the_same(self, checkpoint: Path, theirs: Theirs, algorithm: Algorithm) -> None:
        (checkpoint / "large.bin").write_bytes(bytes(range(256)) * 20_000)
        (checkpoint / "empty").touch()
        assert dict(digest_checkpoint(checkpoint, algorithm=algorithm).digests) == theirs.digests(
            checkpoint, algorithm=algorithm
        )

    @pytest.mark.parametrize("curve", CURVES)
    def test_both_ways_until_a_byte_changes(
        self, checkpoint: Path, tmp_path: Path, theirs: Theirs, curve: str, algorithm: Algorithm
    ) -> None:
        generate_key(tmp_path / "a.key", curve=curve)
        private, public = tmp_path / "a.key", tmp_path / "a.pub"
        signers: list[Callable[[], object]] = [
            lambda: sign(checkpoint, load_private_key(private), algorithm=algorithm),
            lambda: theirs.sign(checkpoint, private, algorithm=algorithm),
        ]
        for sign_it in signers:
            sign_it()
            theirs.verify(checkpoint, public, algorithm=algorithm)
            theirs.verify_by_what_the_signature_says(checkpoint, public)
            assert we_find_nothing(checkpoint, public)
            for path in ("config.json", "tokenizer/tokenizer.json"):
                flip_a_byte(checkpoint / path, at=0)
                with pytest.raises(ValueError, match=f"Hash mismatch for .*{path}"):
                    theirs.verify(checkpoint, public, algorithm=algorithm)
                assert not we_find_nothing(checkpoint, public)
                flip_a_byte(checkpoint / path, at=0)

    def test_a_byte_of_the_signed_text_changed_is_refused_by_both(
        self, checkpoint: Path, pair: tuple[Path, Path], theirs: Theirs, algorithm: Algorithm
    ) -> None:
        import base64
        import json

        private, public = pair
        for sign_it in (
            lambda: sign(checkpoint, load_private_key(private), algorithm=algorithm),
            lambda: theirs.sign(checkpoint, private, algorithm=algorithm),
        ):
            sign_it()
            bundle = json.loads((checkpoint / "model.sig").read_bytes())
            payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
            changed = payload.replace(b"config.json", b"config.jsom")
            bundle["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
            (checkpoint / "model.sig").write_text(json.dumps(bundle))
            with pytest.raises(Exception):  # noqa: B017  theirs is InvalidSignature, of the library below
                theirs.verify(checkpoint, public, algorithm=algorithm)
            with pytest.raises(TrustError, match="not by the key"):
                we_find_nothing(checkpoint, public)

    def test_extra_and_missing_files_are_refused_by_both(
        self, checkpoint: Path, pair: tuple[Path, Path], theirs: Theirs, algorithm: Algorithm
    ) -> None:
        private, public = pair
        sign(checkpoint, load_private_key(private), algorithm=algorithm)
        (checkpoint / "extra.safetensors").touch()
        with pytest.raises(ValueError, match="Extra files"):
            theirs.verify(checkpoint, public, algorithm=algorithm)
        trust = Trust.signed(Keyring.load([public]))
        assert check_all(identify(checkpoint, trust)).extra == ("extra.safetensors",)
        (checkpoint / "extra.safetensors").unlink()
        (checkpoint / "config.json").unlink()
        with pytest.raises(ValueError, match="Missing files"):
            theirs.verify(checkpoint, public, algorithm=algorithm)
        assert check_all(identify(checkpoint, trust)).missing == ("config.json",)

    def test_a_download_directory_both_ways(
        self, checkpoint: Path, pair: tuple[Path, Path], theirs: Theirs, algorithm: Algorithm
    ) -> None:
        """They sign what a download leaves in .cache/huggingface; we do not, and say so in the signature."""
        private, public = pair
        note = checkpoint / ".cache" / "huggingface" / "download" / "config.json.metadata"
        note.parent.mkdir(parents=True)
        note.write_text("etag")
        for name in (".gitattributes", ".gitignore", ".git/config", ".github/workflow"):
            (checkpoint / name).parent.mkdir(exist_ok=True)
            (checkpoint / name).touch()
        sign(checkpoint, load_private_key(private), algorithm=algorithm)
        note.write_text("another etag")
        theirs.verify(checkpoint, public, algorithm=algorithm)
        assert we_find_nothing(checkpoint, public)

        theirs.sign(checkpoint, private, algorithm=algorithm)
        assert we_find_nothing(checkpoint, public)
        note.write_text("a third etag")
        # What they signed is what counts, wherever it lies.
        assert check_all(identify(checkpoint, Trust.signed(Keyring.load([public])))).changed == (
            ".cache/huggingface/download/config.json.metadata",
        )

    def test_a_hub_snapshot_both_ways(
        self, tmp_path: Path, pair: tuple[Path, Path], theirs: Theirs, algorithm: Algorithm
    ) -> None:
        private, public = pair
        snapshot = make_hub_snapshot(tmp_path / "hub")
        sign(snapshot, load_private_key(private), algorithm=algorithm)
        theirs.verify(snapshot, public, algorithm=algorithm, links=True)
        theirs.sign(snapshot, private, algorithm=algorithm, links=True)
        assert identify(snapshot, Trust.signed(Keyring.load([public]))).manifest.allow_symlinks
        assert we_find_nothing(snapshot, public)


def test_what_they_sign_in_pieces_is_refused_with_the_reason(
    checkpoint: Path, pair: tuple[Path, Path], theirs: Theirs
) -> None:
    private, public = pair
    config = theirs._library.hashing.Config().use_shard_serialization()
    theirs._library.signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(
        config.set_ignored_paths(paths=["model.sig"])
    ).sign(checkpoint, checkpoint / "model.sig")
    with pytest.raises(TrustError, match="signed by 'shards', and only whole files are supported"):
        identify(checkpoint, Trust.signed(Keyring.load([public])))
