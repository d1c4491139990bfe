"""The checkpoint manifest: each file's content digest, and the root digest over all of them.

The root digest is the SHA-256 of these UTF-8 lines, each ended by a newline:

    appliance checkpoint v1 ALGORITHM
    DIGEST  PATH

with one DIGEST line (lower-case hex, two spaces, path below the checkpoint) for each file, sorted by the bytes of the
path. A path holds no control characters, so no two manifests give the same lines. For SHA-256 that is
`(echo 'appliance checkpoint v1 sha256'; sha256sum FILES | LC_ALL=C sort -k2) | sha256sum`.
The directory's own name is not in it: a checkpoint that is moved is still the same one. Nor is the root digest the
`subject` of an OpenSSF signature, which covers the files' digests but not their names.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from appliance.checkpoint.files import MAX_FILES, SIGNATURE_NAME, path_fault
from appliance.errors import ApplianceError, TrustError

Algorithm = Literal["sha256", "blake3"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class FileDigest:
    """A path below the checkpoint and the hex digest of that file's bytes."""

    path: str
    digest: str


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint consists of. `name` informs only; `ignored` are paths that may lie there without being listed.

    `allow_symlinks` says whether some of the files were links when it was made. A digest covers what a link leads to.
    """

    name: str
    algorithm: Algorithm
    files: tuple[FileDigest, ...]
    allow_symlinks: bool = False
    ignored: tuple[str, ...] = ()

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """Path to hex digest."""
        return {file.path: file.digest for file in self.files}

    @cached_property
    def root_digest(self) -> str:
        """64 hex digits; equal when, and only when, algorithm, paths and digests all are."""
        lines = [f"appliance checkpoint v1 {self.algorithm}\n"]
        lines += (f"{file.digest}  {file.path}\n" for file in sorted(self.files, key=lambda file: file.path.encode()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def make_manifest(
    name: str,
    algorithm: str,
    files: Iterable[tuple[str, str]],
    *,
    allow_symlinks: bool = False,
    ignored: Iterable[str] = (),
    what: str = "checkpoint manifest",
    error: type[ApplianceError] = TrustError,
) -> CheckpointManifest:
    """Return the manifest only if all of this holds; `error`, naming `what`, on the first that does not.

    1. the algorithm is one we know
    2. there is a file, and there are no more than MAX_FILES
    3. each digest is 64 lower-case hex digits
    4. no path is absolute, unprintable, written another way than the shortest, or climbs out
    5. no path is there twice, and none is the signature's own
    """
    if algorithm not in ALGORITHMS:
        raise error(f"{what}: digest algorithm {algorithm!r} is none of {', '.join(ALGORITHMS)}")
    listed = sorted(FileDigest(path, digest) for path, digest in files)
    if not 0 < len(listed) <= MAX_FILES:
        raise error(f"{what}: lists {len(listed)} files; between 1 and {MAX_FILES} are allowed")
    previous = None
    for file in listed:
        if not _DIGEST.fullmatch(file.digest):
            raise error(f"{what}: {file.path!r}: digest {file.digest[:80]!r} is not 64 hex digits")
        if reason := path_fault(file.path):
            raise error(f"{what}: path {file.path[:200]!r} {reason}")
        if file.path in (previous, SIGNATURE_NAME):
            raise error(f"{what}: path {file.path!r} is listed twice or is the signature's own")
        previous = file.path
    return CheckpointManifest(
        name=name,
        algorithm=algorithm,
        files=tuple(listed),
        allow_symlinks=allow_symlinks,
        ignored=tuple(sorted(path for path in set(ignored) if not path_fault(path))),
    )
