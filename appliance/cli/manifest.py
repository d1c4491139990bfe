"""Commands that look at a manifest."""

import json
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.options import MANIFEST
from appliance.manifest.inventory import json_schema
from appliance.manifest.load import load_manifest


def check(file: Annotated[Path, typer.Argument(help="the manifest to check")] = MANIFEST) -> None:
    """Say whether a manifest is right; if not, every error at once, each with its place."""
    manifest = load_manifest(file)
    models = ", ".join(manifest.models) or "none"
    print(f"{file}: ok; models: {models}")


def schema() -> None:
    """Print the manifest's JSON schema, for editors."""
    print(json.dumps(json_schema(), indent=2))
