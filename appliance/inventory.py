"""Which GPUs and which package versions this host has, read without opening a device or importing what it names."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ConfigError, HostError

DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
ABSENT = "(not installed)"


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver's /proc files describe it; `index` is its place in PCI bus order, as nvidia-smi counts."""

    index: int
    uuid: str
    model: str


def gpus(folder: Path = DRIVER_FOLDER) -> list[Gpu]:
    """Return the host's NVIDIA GPUs; empty where there is no driver. HostError where the driver's files are unreadable.

    They are world-readable, so no device is needed.
    """
    found = []
    for index, path in enumerate(sorted(folder.glob("*/information"))):
        try:
            text = path.read_text(errors="replace")
        except OSError as error:
            raise HostError(f"cannot read {path}: {error.strerror}", hint="is the driver being unloaded?") from error
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        found.append(Gpu(index, facts.get("GPU UUID", "").strip(), facts.get("Model", "").strip()))
    return found


def resolve(wanted: Sequence[int | str], *, folder: Path = DRIVER_FOLDER) -> tuple[str, ...]:
    """Return the UUIDs of GPUs named by index or UUID; ConfigError for one that is not here, or named twice."""
    present = gpus(folder)
    uuids = []
    for name in wanted:
        match = next((gpu for gpu in present if name in (gpu.index, gpu.uuid)), None)
        if match is None:
            have = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in present) or "none"
            raise ConfigError(f"GPU {name} is not on this host", hint=f"GPUs here: {have}")
        if match.uuid in uuids:
            raise ConfigError(f"GPU {name} is named twice: it is {match.index} and {match.uuid}")
        uuids.append(match.uuid)
    return tuple(uuids)


def version(package: str) -> str:
    """Return a package's installed version from its metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
