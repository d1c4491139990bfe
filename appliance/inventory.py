"""Which GPUs and which package versions this host has, read without opening a device or importing what it names."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ConfigError

DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
ABSENT = "(not installed)"


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver's /proc files describe it; `index` is its place in PCI bus order, as nvidia-smi counts."""

    index: int
    uuid: str
    model: str


def gpus(folder: Path = DRIVER_FOLDER) -> list[Gpu]:
    """Return the host's NVIDIA GPUs; empty where there is no driver. World-readable, so no device is needed."""
    found = []
    for index, path in enumerate(sorted(folder.glob("*/information"))):
        facts = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        found.append(Gpu(index, facts.get("GPU UUID", "").strip(), facts.get("Model", "").strip()))
    return found


def resolve(wanted: Sequence[int | str], *, folder: Path = DRIVER_FOLDER) -> tuple[str, ...]:
    """Return the UUIDs of GPUs named by index or UUID; ConfigError for one that this host does not have."""
    present = gpus(folder)
    uuids = []
    for name in wanted:
        match = next((gpu for gpu in present if name in (gpu.index, gpu.uuid)), None)
        if match is None:
            have = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in present) or "none"
            raise ConfigError(f"GPU {name} is not on this host", hint=f"GPUs here: {have}")
        uuids.append(match.uuid)
    return tuple(uuids)


def version(package: str) -> str:
    """Return a package's installed version from its metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
