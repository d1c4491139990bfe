"""`appliance up`: keepers and engines of a manifest in the foreground, without systemd."""

import asyncio
import sys

import typer

from appliance.cli.options import MANIFEST, ManifestOption


def up(manifest: ManifestOption = MANIFEST) -> None:
    """Run the manifest's keepers and engines on this terminal until Ctrl-C."""
    from appliance.up.foreground import run

    status = asyncio.run(run(manifest, sys.stderr))
    if status:
        raise typer.Exit(status)
