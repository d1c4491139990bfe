"""Commands on a checkpoint: its keys, its signature, its digest, its pin."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from appliance.checkpoint import keys, signature
from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.findings import check_all
from appliance.checkpoint.identity import Trust, identify
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.manifest import CheckpointManifest
from appliance.checkpoint.pins import Pins
from appliance.checkpoint.streams import OnProgress, Progress
from appliance.cli.options import MANIFEST, CheckpointArgument, ManifestOption, ModelArgument
from appliance.errors import ConfigError
from appliance.manifest.load import load_manifest

Algorithm = Literal["sha256", "blake3"]
AlgorithmOption = Annotated[Algorithm, typer.Option("--algorithm", help="digest of the files' contents")]


def keygen(
    key: Annotated[Path, typer.Argument(help="where the private key goes; the public one beside it, as NAME.pub")],
    curve: Annotated[Literal["P-256", "P-384", "P-521"], typer.Option(help="elliptic curve")] = "P-256",
) -> None:
    """Make a key pair for signing checkpoints. Nothing is overwritten."""
    public = keys.generate_key(key, curve=curve)
    print(f"private key: {key}")
    print(f"public key:  {key.with_suffix('.pub')} (fingerprint {public.fingerprint})")


def sign(
    checkpoint: CheckpointArgument,
    key: Annotated[Path, typer.Option("--key", help="private key in PEM")],
    algorithm: AlgorithmOption = "sha256",
) -> None:
    """Hash a checkpoint's files and write model.sig beside them."""
    private = keys.load_private_key(key)
    with _bar("signing") as on_progress:
        manifest = signature.sign(checkpoint, private, algorithm=algorithm, on_progress=on_progress)
    print(f"{checkpoint}: signed; {_described(manifest)}")


def verify(
    checkpoint: CheckpointArgument,
    key: Annotated[list[Path], typer.Option("--key", help="public key in PEM, or a folder of them; repeatable")],
) -> None:
    """Check a checkpoint's signature and every byte of its files; changed, missing and extra files are listed."""
    identity = identify(checkpoint, Trust.signed(Keyring.load(key)))
    with _bar("verifying") as on_progress:
        check_all(identity, on_progress=on_progress).require_none(identity)
    print(f"{checkpoint}: signed by {identity.signer}; {_described(identity.manifest)}")


def digest(checkpoint: CheckpointArgument, algorithm: AlgorithmOption = "sha256") -> None:
    """Print a checkpoint's root digest and each file's digest, signed or not."""
    with _bar("hashing") as on_progress:
        manifest = digest_checkpoint(checkpoint, algorithm=algorithm, on_progress=on_progress)
    print(f"{manifest.root_digest}  (root)")
    for path, value in manifest.digests.items():
        print(f"{value}  {path}")


def pin(model: ModelArgument, manifest: ManifestOption = MANIFEST) -> None:
    """Pin an unsigned model's checkpoint as it is now, in place of what was pinned before."""
    parsed = load_manifest(manifest)
    checkpoint = parsed.model(model).checkpoint
    if parsed.trust.policy != "local":
        raise ConfigError(f"{model}: trust.policy is {parsed.trust.policy}: checkpoints are signed, not pinned")
    with _bar("pinning") as on_progress:
        pinned = Pins.below(parsed.directories.state).repin(checkpoint, on_progress=on_progress)
    print(f"{checkpoint}: pinned, unsigned; {_described(pinned)}")


def _described(manifest: CheckpointManifest) -> str:
    return f"{len(manifest.files)} files, root digest {manifest.root_digest} ({manifest.algorithm})"


@contextlib.contextmanager
def _bar(doing: str) -> Iterator[OnProgress | None]:
    """Show a progress bar on a terminal, and nothing anywhere else."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(doing, total=None)

        def show(progress: Progress) -> None:
            bars.update(task, completed=progress.bytes_done, total=progress.bytes_total)

        yield show
