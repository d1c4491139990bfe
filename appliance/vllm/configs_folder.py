"""A checkpoint's configs in a folder of their own, where vLLM finds everything but weights.

The folder's name is the root digest, so that it is the same at every start: vLLM keys what it compiles by that path.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from appliance import configs
from appliance.errors import HostError
from appliance.turns import turn


def kept_configs(state: Path, root_digest: str, files: Mapping[str, bytes]) -> Path:
    """Return STATE/configs/ROOT_DIGEST, with exactly these files in it; HostError where they cannot be written."""
    folder = state / "configs" / root_digest
    with turn(state, f"configs-{root_digest}"):
        if not _holds(folder, files):
            _make(folder, files)
    return folder


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    try:
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
        return there == files.keys() and all((folder / path).read_bytes() == data for path, data in files.items())
    except OSError:
        return False


def _make(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace the folder by renaming: who reads in the old one reads on."""
    try:
        folder.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as place:
            fresh = Path(place) / "fresh"
            fresh.mkdir(mode=0o750)
            configs.write(files, fresh)
            if folder.is_dir():
                folder.rename(Path(place) / "old")
            fresh.rename(folder)
    except OSError as error:
        raise HostError(f"cannot keep configs in {folder}: {error.strerror or error}") from error
