"""The checkpoint manifest: what may be listed, and what the root digest covers."""

import hashlib
import itertools
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.files import MAX_FILES
from appliance.checkpoint.manifest import CheckpointManifest, make_manifest
from appliance.errors import ConfigError, TrustError

A, B = "a" * 64, "b" * 64


def manifest(*files: tuple[str, str], algorithm: str = "sha256") -> CheckpointManifest:
    return make_manifest("tiny", algorithm, files)


def test_the_root_digest_is_that_of_the_documented_text() -> None:
    text = f"appliance checkpoint v1 sha256\n{A}  a\n{B}  b/c\n"
    assert manifest(("b/c", B), ("a", A)).root_digest == hashlib.sha256(text.encode()).hexdigest()


def test_an_operator_can_compute_the_root_digest_with_sha256sum(checkpoint: Path) -> None:
    script = (
        "(echo 'appliance checkpoint v1 sha256'; find . -type f -printf '%P\\0' | xargs -0 sha256sum"
        " | LC_ALL=C sort -k2) | sha256sum"
    )
    shown = subprocess.run(["bash", "-c", script], cwd=checkpoint, check=True, capture_output=True, text=True).stdout
    assert shown.split()[0] == digest_checkpoint(checkpoint).root_digest


def test_paths_digests_and_algorithm_each_change_the_root_digest() -> None:
    variants = [
        manifest(("a", A), ("b", B)),
        manifest(("a", B), ("b", A)),
        manifest(("a", A), ("c", B)),
        manifest(("a", A)),
        manifest(("a", A), ("b", B), ("c", B)),
        manifest(("a", A), ("b", B), algorithm="blake3"),
    ]
    for one, other in itertools.combinations(variants, 2):
        assert one.root_digest != other.root_digest


def test_order_name_links_and_ignored_paths_do_not() -> None:
    first = manifest(("a", A), ("b", B))
    assert manifest(("b", B), ("a", A)) == first
    for other in (
        replace(first, name="other"),
        replace(first, allow_symlinks=True),
        replace(first, ignored=("x",)),
        CheckpointManifest("tiny", "sha256", tuple(reversed(first.files))),
    ):
        assert other.root_digest == first.root_digest


def test_the_root_digest_of_this_release_is_the_root_digest_of_every_release() -> None:
    # Pins, records and fingerprints of an installed base hold these.
    assert manifest(("a", A), ("b/c", B)).root_digest == (
        "d829b004e40aa309290d163995559625fc385f2adbd53e09484369f7d35f2cd6"
    )


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "between 1 and"),
        ([("../a", A)], "does not stay inside"),
        ([("/a", A)], "does not stay inside"),
        ([("a//b", A)], "shortest form"),
        ([("./a", A)], "shortest form"),
        ([("a", A), ("a", A)], "twice"),
        ([("a", A), ("a", B)], "twice"),
        ([("model.sig", A)], "signature's own"),
        ([("a\n", A)], "unprintable"),
        ([("a", A.upper())], "64 hex digits"),
        ([("a", A[1:])], "64 hex digits"),
        ([("a", A + "\n")], "64 hex digits"),
        ([("a", "")], "64 hex digits"),
    ],
)
def test_a_list_that_cannot_be_a_checkpoint_is_refused(files: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(TrustError, match=reason):
        make_manifest("tiny", "sha256", files)
    with pytest.raises(ConfigError, match=f"here: .*{reason}"):
        make_manifest("tiny", "sha256", files, what="here", error=ConfigError)


def test_an_unknown_algorithm_and_too_many_files_are_refused() -> None:
    with pytest.raises(TrustError, match="md5"):
        manifest(("a", A), algorithm="md5")
    with pytest.raises(TrustError, match=str(MAX_FILES)):
        manifest(*((f"f{number}", A) for number in range(MAX_FILES + 1)))


def test_ignored_paths_that_lead_elsewhere_are_dropped() -> None:
    made = make_manifest("tiny", "sha256", [("a", A)], ignored=["x", "x", "../up", "/abs", ".", "b"])
    assert made.ignored == ("b", "x")
