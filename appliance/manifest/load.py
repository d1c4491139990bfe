"""From a path to a Manifest."""

from pathlib import Path

import yaml
from pydantic import ValidationError

from appliance.errors import ConfigError
from appliance.manifest.schema import Manifest


def load_manifest(path: Path) -> Manifest:
    """Return what the file says; ConfigError otherwise."""
    try:
        data = yaml.safe_load(path.read_text())
        return Manifest.model_validate(data, context={"folder": path.absolute().parent}, by_alias=True, by_name=False)
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
