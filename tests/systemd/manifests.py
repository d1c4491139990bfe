"""Manifests as they come out of a file, and the files that they lead to."""

from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from appliance.host.unit_files import APPLIED, applied_manifest, unit_files
from appliance.host.unit_text import Files
from appliance.inventory import Gpu
from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest

SOURCE = PurePosixPath("/etc/appliance/appliance.yaml")
UNITS = Path(__file__).parents[2] / "units"
SHIPPED_SERVICES = sorted(UNITS.glob("*.service"))


def model(port: int = 8001, **settings: Any) -> dict[str, Any]:
    engine = {"port": port, **settings.pop("engine", {})}
    return {"checkpoint": f"/srv/models/{port}", "engine": engine, **settings}


def manifest_of(folder: Path, models: dict[str, dict[str, Any]], **settings: Any) -> Manifest:
    path = folder / "appliance.yaml"
    path.write_text(yaml.safe_dump({"models": models, **settings}))
    return load_manifest(path)


def put_applied(manifest: Manifest, source: Path, *, root: Path) -> Path:
    """Write the copy that an `apply` of this file would leave below a host's root; return it."""
    copy = root / APPLIED
    copy.parent.mkdir(parents=True)
    copy.write_text(applied_manifest(manifest, PurePosixPath(source)))
    return copy


def files_of(
    folder: Path, models: dict[str, dict[str, Any]], *, gpus: dict[str, Gpu] | None = None, **settings: Any
) -> Files:
    return unit_files(manifest_of(folder, models, **settings), SOURCE, gpus or {})


def settings_of(content: object) -> list[tuple[str, str]]:
    """Return the settings of a unit file, in order, without its sections."""
    assert isinstance(content, str)
    lines = [line.partition("=") for line in content.splitlines() if "=" in line and not line.startswith("#")]
    return [(name, value) for name, _, value in lines]
