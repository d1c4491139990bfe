"""Commands that look at a manifest."""

import json
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.options import MANIFEST, ManifestOption
from appliance.manifest.inventory import json_schema
from appliance.manifest.load import load_manifest


def check(
    file: Annotated[Path | None, typer.Argument(help="the manifest to check, instead of --manifest")] = None,
    manifest: ManifestOption = MANIFEST,
) -> None:
    """Say whether a manifest is right; if not, every error at once, each with its place."""
    path = manifest if file is None else file
    models = ", ".join(load_manifest(path).models) or "none"
    print(f"{path}: ok; models: {models}")


def schema() -> None:
    """Print the manifest's JSON schema, for editors."""
    print(json.dumps(json_schema(), indent=2))
