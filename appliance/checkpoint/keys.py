"""Signing keys: EC on P-256, P-384 or P-521, PEM, as OpenSSF Model Signing uses them.

A key's fingerprint is what the format calls its hint: the SHA-256 of the public key as PEM text, in hex.
"""

import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.checkpoint.durable_file import write_durably
from appliance.checkpoint.small_file import SmallFile, read_small_file
from appliance.errors import ConfigError

CURVES: dict[str, type[ec.EllipticCurve]] = {"P-256": ec.SECP256R1, "P-384": ec.SECP384R1, "P-521": ec.SECP521R1}
MAX_KEY_FILE_BYTES = 64 << 10

_HASHES: dict[str, type[hashes.HashAlgorithm]] = {
    "secp256r1": hashes.SHA256,
    "secp384r1": hashes.SHA384,
    "secp521r1": hashes.SHA512,
}
_LABELS: re.Pattern[bytes] = re.compile(rb"^-----BEGIN ([A-Z0-9 ]{1,64})-----", re.MULTILINE)
_GROUP_WRITES_OR_OTHERS = stat.S_IWGRP | stat.S_IRWXO


@dataclass(frozen=True)
class PublicKey:
    """A key that may have signed: `name` is what messages call it, `fingerprint` 64 hex digits."""

    name: str
    fingerprint: str
    _key: ec.EllipticCurvePublicKey = field(repr=False, compare=False)

    def has_signed(self, data: bytes, *, signature: bytes) -> bool:
        """Tell whether this DER signature is by this key over exactly these bytes."""
        try:
            self._key.verify(signature, data, ec.ECDSA(_HASHES[self._key.curve.name]()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """A key to sign with, and its public half."""

    public: PublicKey
    _key: ec.EllipticCurvePrivateKey = field(repr=False, compare=False)

    def sign(self, data: bytes) -> bytes:
        """Return the DER signature over these bytes."""
        return self._key.sign(data, ec.ECDSA(_HASHES[self._key.curve.name]()))


def generate_key(path: Path, *, curve: str = "P-256", public_path: Path | None = None) -> PublicKey:
    """Write a new private key (mode 0600) and its public key (0644, `NAME.pub` beside it). Never overwrites either."""
    if curve not in CURVES:
        raise ConfigError(f"curve {curve!r} is none of {', '.join(CURVES)}")
    public_path = public_path or path.with_suffix(".pub")
    if path == public_path:
        raise ConfigError(f"{path}: private and public key need two names", hint=f"{path.with_suffix('.key')}")
    for each in (path, public_path):
        if os.path.lexists(each):
            raise ConfigError(f"{each} is already there and is not overwritten", hint="choose another name for the key")
    key = ec.generate_private_key(CURVES[curve]())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_durably(path, pem, mode=0o600, replace=False)
    try:
        write_durably(public_path, _public_pem(key.public_key()), mode=0o644, replace=False)
    except ConfigError:
        path.unlink()  # half a pair would only stand in the way of the next try
        raise
    return _public(public_path.stem, key.public_key())


def load_private_key(path: Path) -> PrivateKey:
    """Return the key; ConfigError when others may read it, or it is encrypted, public, or not EC on a known curve."""
    file = _read(path)
    data, mode = file.data, file.mode
    if mode & _GROUP_WRITES_OR_OTHERS:
        raise ConfigError(
            f"private key {path}: others may read it, or its group may write it (mode {mode:04o})",
            hint=f"chmod 600 {path}, and make a new key if it lay open for long",
        )
    label = _label(path, data)
    if "ENCRYPTED" in label or b"Proc-Type: 4,ENCRYPTED" in data:
        raise ConfigError(
            f"private key {path} is encrypted",
            hint=f"openssl pkey -in {path} -out NEW_FILE writes it without a password",
        )
    if "PRIVATE KEY" not in label:
        raise ConfigError(f"{path} is no private key but a {label}", hint="sign with the private key of the pair")
    key = _parse(serialization.load_pem_private_key, data, path, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _HASHES:
        raise _unsupported(path, key)
    return PrivateKey(_public(path.stem, key.public_key()), key)


def load_public_key(path: Path) -> PublicKey:
    """Return the key, named after its file; ConfigError when it is private, a certificate, or no known EC curve."""
    file = _read(path)
    data = file.data
    if file.mode & stat.S_IWOTH:
        raise ConfigError(f"public key {path}: everybody may write it", hint=f"look at it, then chmod 644 {path}")
    label = _label(path, data)
    if "PRIVATE KEY" in label:
        raise ConfigError(
            f"{path} is a private key, and trust needs only its public half",
            hint=f"openssl pkey -in {path} -pubout -out NAME.pub, and keep the private key off this host",
        )
    if label != "PUBLIC KEY":
        raise ConfigError(
            f"{path} is no public key but a {label}", hint="a file with -----BEGIN PUBLIC KEY----- is needed"
        )
    key = _parse(serialization.load_pem_public_key, data, path)
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise _unsupported(path, key)
    return _public(path.stem, key)


def _read(path: Path) -> SmallFile:
    try:
        file = read_small_file(path, limit_bytes=MAX_KEY_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"key {path}: {getattr(error, 'strerror', None) or error}") from error
    if file is None:
        raise ConfigError(f"key {path} is not a regular file")
    if len(file.data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"key {path} is larger than {MAX_KEY_FILE_BYTES} bytes")
    return file


def _label(path: Path, data: bytes) -> str:
    """Return what the PEM block says it is. Two blocks are refused: the second would be left unread, silently."""
    labels: list[str] = [label.decode() for label in _LABELS.findall(data) if label != b"EC PARAMETERS"]
    if len(labels) != 1:
        raise ConfigError(
            f"key {path}: {len(labels)} PEM blocks, and one is needed", hint="one key a file, as PEM text"
        )
    return labels[0]


def _parse(load: Any, data: bytes, path: Path, **options: Any) -> Any:
    try:
        return load(data, **options)
    except UnsupportedAlgorithm as error:
        raise ConfigError(f"key {path}: this kind of key is not supported: {error}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"key {path} is damaged: it cannot be read as PEM") from error


def _unsupported(path: Path, key: Any) -> ConfigError:
    curve = getattr(getattr(key, "curve", None), "name", None)
    kind = f"the curve {curve}" if curve else type(key).__name__.strip("_")
    return ConfigError(
        f"key {path}: {kind} is not supported; model signatures use EC keys on {', '.join(CURVES)}",
        hint="appliance keygen makes one",
    )


def _public(name: str, key: ec.EllipticCurvePublicKey) -> PublicKey:
    return PublicKey(name, hashlib.sha256(_public_pem(key)).hexdigest(), key)


def _public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return bytes(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
