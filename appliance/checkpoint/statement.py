"""A checkpoint manifest as the in-toto statement that OpenSSF Model Signing v1.0 signs, and back.

Format: https://github.com/sigstore/model-transparency, predicate https://model_signing/signature/v1.0. The subject's
digest is the SHA-256 of the files' digests (raw bytes) in the order in which the resources are listed.
"""

import hashlib
import json
from typing import Any

from appliance.checkpoint.json_text import parse_object
from appliance.checkpoint.manifest import CheckpointManifest, make_manifest
from appliance.errors import TrustError

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
MAX_STATEMENT_BYTES = 8 << 20


def encode_statement(manifest: CheckpointManifest) -> bytes:
    """Return the statement as JSON text."""
    files = sorted(manifest.files, key=lambda file: file.path.split("/"))  # model_signing's order
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": manifest.name, "digest": {"sha256": _subject_digest([file.digest for file in files])}},
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": manifest.algorithm,
                "allow_symlinks": manifest.allow_symlinks,
                "ignore_paths": list(manifest.ignored),
            },
            "resources": [
                {"name": file.path, "algorithm": manifest.algorithm, "digest": file.digest} for file in files
            ],
        },
    }
    return json.dumps(statement, separators=(",", ":"), ensure_ascii=False).encode()


def decode_statement(data: bytes, *, what: str) -> CheckpointManifest:
    """Return the manifest in a statement whose signature was verified, only if all of this holds; TrustError if not.

    1. it is an in-toto v1 statement about one subject, with the predicate of Model Signing v1.0
    2. it lists whole files (not pieces of them), all digested with one algorithm
    3. the subject's digest is that of the listed digests
    4. the list makes a checkpoint manifest (see `make_manifest`)

    Other fields are ignored, as the format asks.
    """
    statement = parse_object(data, what=what, limit_bytes=MAX_STATEMENT_BYTES)
    _require(statement.get("_type") == STATEMENT_TYPE, f"{what}: not an in-toto v1 statement")
    predicate_type = statement.get("predicateType")
    _require(
        predicate_type == PREDICATE_TYPE, f"{what}: predicate {str(predicate_type)[:80]!r} is not {PREDICATE_TYPE}"
    )
    name, subject_digest = _subject(statement.get("subject"), what)

    predicate = _object(statement.get("predicate"), f"{what}: predicate")
    serialization = _object(predicate.get("serialization"), f"{what}: serialization")
    method = serialization.get("method")
    _require(method == "files", f"{what}: signed by {str(method)[:40]!r}, and only whole files are supported")
    algorithm = _text(serialization.get("hash_type"), f"{what}: hash_type")
    allow_symlinks = serialization.get("allow_symlinks")
    _require(isinstance(allow_symlinks, bool), f"{what}: allow_symlinks is not true or false")
    ignored = [_text(path, f"{what}: ignore_paths") for path in _list(serialization.get("ignore_paths", []), what)]

    resources = [_object(resource, f"{what}: resource") for resource in _list(predicate.get("resources"), what)]
    files = [
        (_text(resource.get("name"), f"{what}: name"), _text(resource.get("digest"), f"{what}: digest"))
        for resource in resources
    ]
    mixed = next(
        (path for (path, _), resource in zip(files, resources, strict=True) if resource.get("algorithm") != algorithm),
        None,
    )
    _require(mixed is None, f"{what}: {mixed!r} is not digested with {algorithm!r} like the rest")
    manifest = make_manifest(name, algorithm, files, allow_symlinks=allow_symlinks is True, ignored=ignored, what=what)
    _require(
        _subject_digest([digest for _, digest in files]) == subject_digest,
        f"{what}: the subject's digest is not that of the listed files",
    )
    return manifest


def _subject(subjects: Any, what: str) -> tuple[str, str]:
    _require(isinstance(subjects, list) and len(subjects) == 1, f"{what}: not exactly one subject")
    subject = _object(subjects[0], f"{what}: subject")
    digest = _object(subject.get("digest"), f"{what}: subject digest")
    return _text(subject.get("name"), f"{what}: subject name"), _text(digest.get("sha256"), f"{what}: subject digest")


def _subject_digest(digests: list[str]) -> str:
    return hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TrustError(f"{what}: not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise TrustError(f"{what}: not a list where one belongs")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TrustError(f"{what}: not text")
    return value


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise TrustError(message)
