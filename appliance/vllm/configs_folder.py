"""A checkpoint's configs in a folder of their own, where vLLM finds everything but weights.

The folder's name is the root digest, so that it is the same at every start: vLLM keys what it compiles by that path.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from appliance import configs
from appliance.errors import HostError


def kept_configs(state: Path, root_digest: str, files: Mapping[str, bytes]) -> Path:
    """Return STATE/configs/ROOT_DIGEST, with exactly these files in it; HostError where they cannot be written."""
    folder = state / "configs" / root_digest
    if _holds(folder, files):
        return folder
    try:
        folder.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{root_digest[:16]}-", dir=folder.parent))
        configs.write(files, fresh)
        _replace(folder, fresh)
    except OSError as error:
        raise HostError(f"cannot keep configs in {folder}: {error.strerror or error}") from error
    if not _holds(folder, files):
        raise HostError(f"{folder}: somebody else writes there")
    return folder


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    try:
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
        return there == files.keys() and all((folder / path).read_bytes() == data for path, data in files.items())
    except OSError:
        return False


def _replace(folder: Path, fresh: Path) -> None:
    """Put the fresh folder in the old one's place. Somebody else may be doing the same with the same files."""
    try:
        fresh.rename(folder)  # onto an empty folder, or none
        return
    except OSError:
        old = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
    try:
        folder.rename(old)
        fresh.rename(folder)
    finally:
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(fresh, ignore_errors=True)
