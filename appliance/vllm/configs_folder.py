"""A checkpoint's configs in a folder of their own, which vLLM is started on.

The folder's name is the root digest, so that it is the same at every start: vLLM keys what it compiles by that path.
Beside the configs lie links to the files of weights. Some quantization methods have vLLM look up in their headers which
layers are quantized; nothing else reads through them, and where the checkpoint is not there they lead nowhere.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from appliance import configs
from appliance.checkpoint.contents import SAFETENSORS
from appliance.checkpoint.identity import Identity
from appliance.errors import HostError
from appliance.turns import turn


def kept_configs(state: Path, identity: Identity, files: Mapping[str, bytes]) -> Path:
    """Return STATE/configs/ROOT_DIGEST, with exactly these files and links in it; HostError where that cannot be."""
    folder = state / "configs" / identity.root_digest
    links = {path: identity.root.path / path for path in identity.manifest.digests if path.endswith(SAFETENSORS)}
    with turn(state, f"configs-{identity.root_digest}"):
        if not _holds(folder, files, links):
            _make(folder, files, links)
    return folder


def _holds(folder: Path, files: Mapping[str, bytes], links: Mapping[str, Path]) -> bool:
    try:
        entries = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        there = {str(path.relative_to(folder)) for path in entries}
        return (
            there == files.keys() | links.keys()
            and all((folder / path).read_bytes() == data for path, data in files.items())
            and all((folder / path).readlink() == target for path, target in links.items())
        )
    except OSError:
        return False


def _make(folder: Path, files: Mapping[str, bytes], links: Mapping[str, Path]) -> None:
    """Replace the folder by renaming: who reads in the old one reads on."""
    try:
        folder.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as place:
            fresh = Path(place) / "fresh"
            fresh.mkdir(mode=0o750)
            configs.write(files, fresh)
            for path, target in links.items():
                (fresh / path).parent.mkdir(parents=True, exist_ok=True)
                (fresh / path).symlink_to(target)
            if folder.is_dir():
                folder.rename(Path(place) / "old")
            fresh.rename(folder)
    except OSError as error:
        raise HostError(f"cannot keep configs in {folder}: {error.strerror or error}") from error
