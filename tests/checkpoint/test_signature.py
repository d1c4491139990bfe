"""A signature file: every way of breaking one is a TrustError, and nothing but a trusted key's own bytes passes."""

import base64
import contextlib
import copy
import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.findings import check_all
from appliance.checkpoint.identity import Trust, identify
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import CURVES, PrivateKey, generate_key, load_private_key
from appliance.checkpoint.manifest import ALGORITHMS, Algorithm, CheckpointManifest, make_manifest
from appliance.checkpoint.signature import (
    MAX_SIGNATURE_BYTES,
    PAYLOAD_TYPE,
    sign,
    sign_manifest,
    verify,
    verify_checkpoint_signature,
)
from appliance.checkpoint.statement import decode_statement, encode_statement
from appliance.errors import ConfigError, TrustError
from tests.checkpoint.checkpoints import make_checkpoint, make_hub_snapshot
from tests.checkpoint.opened import files_opened

CASES = Path(__file__).parent.parent / "cases" / "checkpoint"
MANIFEST = make_manifest(
    "tiny", "sha256", [("config.json", "a" * 64), ("dir/b", "b" * 64)], ignored=["model.sig", ".git"]
)

# A change of a parsed bundle, in place.
Change = Callable[[dict[str, Any]], object]


def signed_payload(payload: bytes, key: PrivateKey) -> bytes:
    """A bundle with this payload, correctly signed, whatever it says."""
    bundle = json.loads(sign_manifest(MANIFEST, key))
    encoded = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(key.sign(encoded)).decode()
    return json.dumps(bundle).encode()


def test_what_was_signed_comes_back(private_key: PrivateKey, keyring: Keyring) -> None:
    verified = verify(sign_manifest(MANIFEST, private_key), keyring)
    assert verified.manifest == MANIFEST
    assert verified.signer == private_key.public and verified.signer.name == "release"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("curve", CURVES)
def test_a_checkpoint_is_signed_and_verified(
    checkpoint: Path, tmp_path: Path, curve: str, algorithm: Algorithm
) -> None:
    generate_key(tmp_path / "a.key", curve=curve)
    manifest = sign(checkpoint, load_private_key(tmp_path / "a.key"), algorithm=algorithm)
    assert manifest.algorithm == algorithm and len(manifest.files) == 6
    trust = Trust.signed(Keyring.load([tmp_path / "a.pub"]))
    identity = identify(checkpoint, trust)
    assert identity.root_digest == manifest.root_digest and identity.signer == "a"
    assert not check_all(identity)


class TestSigning:
    def test_the_file_is_readable_by_all_and_alone(self, checkpoint: Path, private_key: PrivateKey) -> None:
        before = {path.name for path in checkpoint.iterdir()}
        sign(checkpoint, private_key)
        assert {path.name for path in checkpoint.iterdir()} == before | {"model.sig"}
        assert stat.S_IMODE((checkpoint / "model.sig").stat().st_mode) == 0o644

    def test_an_older_signature_is_replaced_and_not_signed(self, checkpoint: Path, private_key: PrivateKey) -> None:
        first = sign(checkpoint, private_key)
        (checkpoint / "config.json").write_text("{}")
        second = sign(checkpoint, private_key)
        assert "model.sig" not in second.digests
        assert first.root_digest != second.root_digest

    def test_in_a_hub_snapshot_it_replaces_a_link_and_leaves_the_blob(
        self, tmp_path: Path, private_key: PrivateKey, keyring: Keyring
    ) -> None:
        snapshot = make_hub_snapshot(tmp_path)
        blob = snapshot.parents[1] / "blobs" / "old-signature"
        blob.write_text("old")
        (snapshot / "model.sig").symlink_to("../../blobs/old-signature")
        manifest = sign(snapshot, private_key)
        assert manifest.allow_symlinks and len(manifest.files) == 6
        assert blob.read_text() == "old" and not (snapshot / "model.sig").is_symlink()
        assert verify_checkpoint_signature(snapshot, keyring).manifest == manifest

    def test_nothing_is_written_where_something_is_wrong(self, checkpoint: Path, private_key: PrivateKey) -> None:
        os.mkfifo(checkpoint / "pipe")
        with pytest.raises(TrustError, match="pipe"):
            sign(checkpoint, private_key)
        assert not (checkpoint / "model.sig").exists()

    def test_an_empty_directory_is_no_checkpoint(self, tmp_path: Path, private_key: PrivateKey) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match="has no files"):
            sign(tmp_path / "empty", private_key)


class TestReading:
    def test_only_the_signature_is_opened(self, checkpoint: Path, private_key: PrivateKey, keyring: Keyring) -> None:
        sign(checkpoint, private_key)
        with files_opened(checkpoint) as opened:
            verify_checkpoint_signature(checkpoint, keyring)
        assert opened == ["model.sig"]

    def test_a_checkpoint_without_one_says_what_to_do(self, checkpoint: Path, keyring: Keyring) -> None:
        with pytest.raises(TrustError, match="is not signed") as caught:
            verify_checkpoint_signature(checkpoint, keyring)
        assert "appliance sign" in str(caught.value)

    def test_what_is_no_plain_file_inside_is_refused(self, checkpoint: Path, keyring: Keyring) -> None:
        signature = checkpoint / "model.sig"
        signature.symlink_to("/etc/hostname")
        with pytest.raises(TrustError, match="leads out"):
            verify_checkpoint_signature(checkpoint, keyring)
        signature.unlink()
        os.mkfifo(signature)
        with pytest.raises(TrustError, match="not a regular file"):
            verify_checkpoint_signature(checkpoint, keyring)

    def test_a_huge_one_is_refused_before_it_is_read(self, checkpoint: Path, keyring: Keyring) -> None:
        (checkpoint / "model.sig").touch()
        os.truncate(checkpoint / "model.sig", 1 << 40)
        with pytest.raises(TrustError, match=f"1099511627776 bytes, more than the {MAX_SIGNATURE_BYTES} allowed"):
            verify_checkpoint_signature(checkpoint, keyring)


BUNDLE_CHANGES: dict[str, tuple[Change, str]] = {
    "another media type": (lambda b: b.update(mediaType="application/json"), "media type"),
    "no media type": (lambda b: b.pop("mediaType"), "media type"),
    "no envelope": (lambda b: b.pop("dsseEnvelope"), "dsseEnvelope: not an object"),
    "a message signature": (lambda b: b.update(messageSignature=b.pop("dsseEnvelope")), "dsseEnvelope"),
    "no signature": (lambda b: b["dsseEnvelope"].update(signatures=[]), "exactly once"),
    "two signatures": (lambda b: b["dsseEnvelope"]["signatures"].append({"sig": ""}), "exactly once"),
    "signatures no list": (lambda b: b["dsseEnvelope"].update(signatures={"0": {}}), "exactly once"),
    "signature no object": (lambda b: b["dsseEnvelope"].update(signatures=["x"]), "signature: not an object"),
    "signature no text": (lambda b: b["dsseEnvelope"]["signatures"][0].update(sig=1), "sig: not text"),
    "signature no base64": (lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="?"), "sig: not base64"),
    "signature not ASCII": (lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="ü"), "sig: not base64"),
    "signature empty": (lambda b: b["dsseEnvelope"]["signatures"][0].update(sig=""), "not by the key"),
    "another payload type": (lambda b: b["dsseEnvelope"].update(payloadType="text/plain"), "payload type"),
    "payload missing": (lambda b: b["dsseEnvelope"].pop("payload"), "payload: not text"),
    "payload no base64": (lambda b: b["dsseEnvelope"].update(payload="{}"), "payload: not base64"),
    "payload empty": (lambda b: b["dsseEnvelope"].update(payload=""), "not by the key"),
    "a certificate": (lambda b: b.update(verificationMaterial={"certificate": {}}), "certificates are not supported"),
    "no material": (lambda b: b.pop("verificationMaterial"), "verificationMaterial"),
    "key no object": (lambda b: b["verificationMaterial"].update(publicKey="x"), "publicKey: not an object"),
    "no hint": (lambda b: b["verificationMaterial"]["publicKey"].pop("hint"), "does not name its key"),
    "a hint of another form": (
        lambda b: b["verificationMaterial"]["publicKey"].update(hint="release"),
        "does not name",
    ),
    "another key's hint": (lambda b: b["verificationMaterial"]["publicKey"].update(hint="0" * 64), "not trusted here"),
}


@pytest.mark.parametrize("name", BUNDLE_CHANGES)
def test_a_bundle_of_another_form_is_refused(name: str, private_key: PrivateKey, keyring: Keyring) -> None:
    change, reason = BUNDLE_CHANGES[name]
    bundle = json.loads(sign_manifest(MANIFEST, private_key))
    change(bundle)
    with pytest.raises(TrustError, match=reason):
        verify(json.dumps(bundle).encode(), keyring)


def test_fields_that_later_releases_may_add_are_ignored(private_key: PrivateKey, keyring: Keyring) -> None:
    bundle = json.loads(sign_manifest(MANIFEST, private_key))
    bundle["later"] = bundle["verificationMaterial"]["later"] = [1]
    assert verify(json.dumps(bundle).encode(), keyring).manifest == MANIFEST
    statement = json.loads(encode_statement(MANIFEST))
    statement["later"] = statement["predicate"]["later"] = statement["predicate"]["resources"][0]["size"] = 1
    assert verify(signed_payload(json.dumps(statement).encode(), private_key), keyring).manifest == MANIFEST


def test_another_key_is_refused_also_under_the_trusted_name(
    tmp_path: Path, private_key: PrivateKey, keyring: Keyring
) -> None:
    generate_key(tmp_path / "release.key")
    forged = json.loads(sign_manifest(MANIFEST, load_private_key(tmp_path / "release.key")))
    with pytest.raises(TrustError, match="not trusted here"):
        verify(json.dumps(forged).encode(), keyring)
    forged["verificationMaterial"]["publicKey"]["hint"] = private_key.public.fingerprint
    with pytest.raises(TrustError, match=r"not by the key it names \(release\)"):
        verify(json.dumps(forged).encode(), keyring)


def test_a_payload_changed_after_signing_is_refused(private_key: PrivateKey, keyring: Keyring) -> None:
    bundle = json.loads(sign_manifest(MANIFEST, private_key))
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b"a" * 64, b"c" * 64)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    with pytest.raises(TrustError, match="not by the key"):
        verify(json.dumps(bundle).encode(), keyring)


def statement_cases() -> list[Path]:
    return sorted(CASES.glob("statements/*.json"))


@pytest.mark.parametrize("case", statement_cases(), ids=lambda path: path.stem)
def test_a_signed_statement_that_says_something_else_is_refused(
    case: Path, private_key: PrivateKey, keyring: Keyring
) -> None:
    first, _, payload = case.read_bytes().partition(b"\n")
    expected = first.decode().removeprefix("# expect: ")
    bundle = signed_payload(payload, private_key)
    if expected == "accepted":
        assert verify(bundle, keyring).manifest.root_digest == MANIFEST.root_digest
        return
    with pytest.raises(TrustError) as caught:
        verify(bundle, keyring)
    assert caught.value.message == f"model.sig: {expected}"


def test_there_are_cases() -> None:
    assert len(statement_cases()) > 20


@pytest.mark.parametrize("case", sorted(CASES.glob("signatures/*.sig")), ids=lambda path: path.stem)
def test_signatures_of_every_release_verify_for_ever(case: Path) -> None:
    keyring = Keyring.load([case.with_suffix(".pub")])
    verified = verify(case.read_bytes(), keyring)
    assert verified.manifest.root_digest == case.with_suffix(".root").read_text().strip()


class TestDamage:
    """Damaged bytes are refused, and never anything but that."""

    def outcomes(self, data: bytes, keyring: Keyring) -> CheckpointManifest | None:
        try:
            return verify(data, keyring).manifest
        except TrustError:
            return None

    def test_every_byte_of_a_bundle_counts_or_changes_nothing(self, private_key: PrivateKey, keyring: Keyring) -> None:
        good = sign_manifest(MANIFEST, private_key)
        for at in range(len(good)):
            for bit in (1, 0x20, 0x80):
                data = bytearray(good)
                data[at] ^= bit
                # "tlogEntries" and "keyid" are not signed and mean nothing; what is accepted is what was signed.
                assert self.outcomes(bytes(data), keyring) in (None, MANIFEST)

    def test_every_truncation_is_refused(self, private_key: PrivateKey, keyring: Keyring) -> None:
        good = sign_manifest(MANIFEST, private_key)
        assert all(self.outcomes(good[:length], keyring) is None for length in range(len(good)))

    def test_random_bytes_nesting_and_other_files_are_refused(self, keyring: Keyring) -> None:
        randomness = random.Random(3)
        for data in (
            *(randomness.randbytes(randomness.randrange(300)) for _ in range(300)),
            b"[" * 200_000,
            b'{"a":' * 200_000,
            b"{}",
            b"null",
            b"\0" * 1000,
            b"-----BEGIN PUBLIC KEY-----\n",
            b'{"mediaType": 1e999999}',
        ):
            assert self.outcomes(data, keyring) is None

    def test_signed_damage_is_refused_or_a_manifest(self, private_key: PrivateKey, keyring: Keyring) -> None:
        """Statements changed at random before signing: the parser behind the signature holds as well."""
        randomness = random.Random(4)
        statement = json.loads(encode_statement(MANIFEST))
        odd: list[Any] = [None, True, 0, -1, 1.5, "", "x", "../x", [], [[]], {}, {"sha256": 1}, "a" * 64, "\0", 10**30]
        for _ in range(600):
            changed = copy.deepcopy(statement)
            for _ in range(randomness.randint(1, 2)):
                container, key = randomness.choice(list(places(changed)))
                if randomness.random() < 0.3 and isinstance(container, dict):
                    del container[key]
                else:
                    container[key] = randomness.choice(odd)
            data = json.dumps(changed).encode()
            with contextlib.suppress(TrustError):
                assert decode_statement(data, what="it").files
            if randomness.random() < 0.2:
                self.outcomes(signed_payload(data, private_key), keyring)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def test_a_signature_of_ten_thousand_files_fits(private_key: PrivateKey, keyring: Keyring) -> None:
    files = [(f"a-directory-name/model-{number:05}-of-10000.safetensors", f"{number:064x}") for number in range(10_000)]
    bundle = sign_manifest(make_manifest("big", "sha256", files), private_key)
    assert len(bundle) < MAX_SIGNATURE_BYTES
    assert len(verify(bundle, keyring).manifest.files) == 10_000


def test_making_a_checkpoint_twice_gives_the_same_root_digest(tmp_path: Path, private_key: PrivateKey) -> None:
    one, other = (sign(make_checkpoint(tmp_path / name), private_key) for name in ("one", "other"))
    linked = sign(make_hub_snapshot(tmp_path / "hub"), private_key)
    assert one.root_digest == other.root_digest == linked.root_digest
