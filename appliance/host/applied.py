"""What was applied last: what runs, whatever has become of the operator's file since."""

from pathlib import Path

from appliance.host.unit_files import APPLIED
from appliance.host.unit_text import heading

ROOT = Path("/")


def running(source: Path, root: Path = ROOT) -> Path:
    """Return the file that keepers and engines go by: the copy that was applied from this one, else the file itself."""
    copy = root / APPLIED
    try:
        with copy.open() as file:
            first = file.readline()
    except (OSError, ValueError):
        return source
    return copy if first.rstrip("\n") == heading(source.absolute()) else source
