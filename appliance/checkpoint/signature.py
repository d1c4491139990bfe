"""`model.sig`: a checkpoint manifest signed with a key, in the format of OpenSSF Model Signing v1.0.

A sigstore bundle (JSON) holds a DSSE envelope, whose payload is the in-toto statement of `statement.py`. What
`model_signing` 1.0 and later signs with a key is read here, and it reads what is written here.
"""

import base64
import binascii
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.durable_file import write_durably
from appliance.checkpoint.files import SIGNATURE_NAME, CheckpointRoot, find_root, open_file
from appliance.checkpoint.json_text import parse_object
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import PrivateKey, PublicKey
from appliance.checkpoint.manifest import Algorithm, CheckpointManifest
from appliance.checkpoint.os_refusal import os_refusal
from appliance.checkpoint.small_file import read_up_to
from appliance.checkpoint.statement import decode_statement, encode_statement
from appliance.checkpoint.streams import OnProgress
from appliance.errors import ConfigError, TrustError

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_SIGNATURE_BYTES = 8 << 20

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class VerifiedSignature:
    """A checkpoint manifest, and the trusted key that signed it."""

    manifest: CheckpointManifest
    signer: PublicKey


def sign(
    checkpoint: Path | CheckpointRoot,
    key: PrivateKey,
    *,
    algorithm: Algorithm = "sha256",
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> CheckpointManifest:
    """Hash the checkpoint and write its `model.sig` in one step (mode 0644), replacing an older one.

    Refuses what `digest_checkpoint` refuses; then nothing is written.
    """
    root = find_root(checkpoint)
    manifest = digest_checkpoint(root, algorithm=algorithm, threads=threads, on_progress=on_progress)
    bundle = sign_manifest(manifest, key)
    if len(bundle) > MAX_SIGNATURE_BYTES:
        raise ConfigError(f"checkpoint {root}: its signature would be larger than {MAX_SIGNATURE_BYTES} bytes")
    write_durably(root.path / SIGNATURE_NAME, bundle, mode=0o644, replace=True)
    return manifest


def sign_manifest(manifest: CheckpointManifest, key: PrivateKey) -> bytes:
    """Return the signature file's bytes."""
    payload = encode_statement(manifest)
    bundle = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key.public.fingerprint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(key.sign(_signed_bytes(payload))).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle, separators=(",", ":")).encode()


def verify_checkpoint_signature(checkpoint: Path | CheckpointRoot, keyring: Keyring) -> VerifiedSignature:
    """Return what the checkpoint's `model.sig` says, verified; opens that one file and no other.

    TrustError where there is none, or `verify` refuses it.
    """
    root = find_root(checkpoint)
    return verify(_read(root), keyring, what=f"{root.path / SIGNATURE_NAME}")


def claimed_manifest(checkpoint: Path | CheckpointRoot) -> CheckpointManifest:
    """Return what `model.sig` claims, its signature unverified: to be compared with what was verified, and no more.

    TrustError where there is none, or it is malformed.
    """
    root = find_root(checkpoint)
    what = f"{root.path / SIGNATURE_NAME}"
    payload, _, _ = _open_bundle(_read(root), what)
    return decode_statement(payload, what=what)


def verify(bundle: bytes, keyring: Keyring, *, what: str = SIGNATURE_NAME) -> VerifiedSignature:
    """Return the checkpoint manifest only if all of this holds; TrustError on the first that does not.

    1. the bundle is a sigstore bundle with one DSSE envelope, signed once, with a key (not a certificate)
    2. the envelope carries an in-toto statement
    3. the key it names is in the keyring
    4. the signature is by that key, over exactly the payload and its type
    5. the statement makes a checkpoint manifest (see `decode_statement`); read only now, when it is known whose it is

    The files themselves are checked while they load.
    """
    payload, signature, fingerprint = _open_bundle(bundle, what)
    key = keyring.find(fingerprint)
    if key is None:
        raise TrustError(
            f"{what}: signed with a key that is not trusted here (fingerprint {fingerprint[:16]}...)",
            hint="if the signer is to be trusted, add the public key to the trust settings",
        )
    if not key.has_signed(_signed_bytes(payload), signature=signature):
        raise TrustError(f"{what}: the signature is not by the key it names ({key.name}): it was changed since")
    return VerifiedSignature(decode_statement(payload, what=what), key)


def _read(root: CheckpointRoot) -> bytes:
    path = root.path / SIGNATURE_NAME
    if not os.path.lexists(path):
        raise TrustError(
            f"checkpoint {root} is not signed: no {SIGNATURE_NAME} in it",
            hint="appliance sign CHECKPOINT --key KEY, or trust: {policy: local} to pin it as it is",
        )
    with open_file(root, SIGNATURE_NAME) as descriptor:
        size_bytes = os.fstat(descriptor.fileno()).st_size
        if size_bytes > MAX_SIGNATURE_BYTES:
            raise TrustError(f"{path}: {size_bytes} bytes, more than the {MAX_SIGNATURE_BYTES} allowed")
        try:
            return read_up_to(descriptor, MAX_SIGNATURE_BYTES + 1)
        except OSError as error:
            raise os_refusal(error, f"read {path}") from error


def _open_bundle(data: bytes, what: str) -> tuple[bytes, bytes, str]:
    """Return payload, signature and the fingerprint of the key, none of them trusted yet."""
    bundle = parse_object(data, what=what, limit_bytes=MAX_SIGNATURE_BYTES)
    if bundle.get("mediaType") != BUNDLE_TYPE:
        raise TrustError(f"{what}: media type {str(bundle.get('mediaType'))[:80]!r} is not {BUNDLE_TYPE}")
    envelope = _object(bundle.get("dsseEnvelope"), f"{what}: dsseEnvelope")
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise TrustError(f"{what}: not signed exactly once")
    if envelope.get("payloadType") != PAYLOAD_TYPE:
        raise TrustError(f"{what}: payload type {str(envelope.get('payloadType'))[:80]!r} is not {PAYLOAD_TYPE}")
    material = _object(bundle.get("verificationMaterial"), f"{what}: verificationMaterial")
    if "publicKey" not in material:
        raise TrustError(f"{what}: not signed with a key, and certificates are not supported")
    hint = _object(material["publicKey"], f"{what}: publicKey").get("hint")
    if not isinstance(hint, str) or not _FINGERPRINT.fullmatch(hint):
        raise TrustError(
            f"{what}: does not name its key by fingerprint", hint="sign it again with model_signing 1.0 or later"
        )
    signature = _object(signatures[0], f"{what}: signature").get("sig")
    return _decoded(envelope.get("payload"), f"{what}: payload"), _decoded(signature, f"{what}: sig"), hint


def _signed_bytes(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding (protocol v1.0.0)."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TrustError(f"{what}: not an object")
    return value


def _decoded(value: Any, what: str) -> bytes:
    if not isinstance(value, str):
        raise TrustError(f"{what}: not text")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TrustError(f"{what}: not base64") from error
