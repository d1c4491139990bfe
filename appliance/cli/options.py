"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from appliance.manifest.schema import DEFAULT_PATH

ManifestOption = Annotated[
    Path, typer.Option("--manifest", "-m", envvar="APPLIANCE_MANIFEST", help="the manifest to use")
]
ModelArgument = Annotated[str, typer.Argument(help="a model's name in the manifest")]
CheckpointArgument = Annotated[Path, typer.Argument(help="a checkpoint's folder")]
ForceOption = Annotated[bool, typer.Option("--force", help="even while it is in use")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON, for machines")]

MANIFEST = DEFAULT_PATH
