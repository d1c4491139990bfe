"""The manifest as it was applied last: what runs, whatever has become of the operator's file since."""

from pathlib import Path

from appliance.host.unit_files import APPLIED
from appliance.host.unit_text import heading
from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest


def applied(source: Path, root: Path) -> Manifest | None:
    """Return the copy below a host's root; None where it is not there, or was made from another file than this."""
    copy = root / APPLIED
    try:
        with copy.open() as file:
            first = file.readline()
    except (OSError, ValueError):
        return None
    if first.rstrip("\n") != heading(source.absolute()):
        return None
    return load_manifest(copy)
