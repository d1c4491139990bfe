"""Which GPUs and which package versions this host has, read without opening a device or importing what it names."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ConfigError, HostError
from appliance.gpus import GpuPart, GpuState, gpu_states

DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
CAPABILITIES_FOLDER = Path("/proc/driver/nvidia/capabilities")
ABSENT = "(not installed)"
PART_PREFIX = "MIG-"


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver's /proc files describe it; `index` is its place in PCI bus order, as nvidia-smi counts.

    `minor` is the N of its device node, /dev/nvidiaN. A part of it is one too, of its own UUID, which takes
    `capabilities` besides: the N of each /dev/nvidia-caps/nvidia-capN.
    """

    index: int
    uuid: str
    model: str
    minor: int = 0
    capabilities: tuple[int, ...] = ()

    @property
    def devices(self) -> dict[str, str]:
        """Return the device nodes that a process needs for it, each with the access that it needs."""
        nodes = {f"/dev/nvidia-caps/nvidia-cap{number}": "r" for number in self.capabilities}
        return {f"/dev/nvidia{self.minor}": "rw"} | nodes


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
        minor = facts.get("Device Minor", "").strip()
        uuid, model = (facts.get(name, "").strip() for name in ("GPU UUID", "Model"))
        found.append(Gpu(index, uuid, model, int(minor) if minor.isdigit() else index))
    return found


def by_name(
    wanted: Iterable[int | str],
    *,
    folder: Path = DRIVER_FOLDER,
    capabilities: Path = CAPABILITIES_FOLDER,
    states: Callable[[], Sequence[GpuState]] = gpu_states,
) -> dict[str, Gpu]:
    """Return the host's GPUs by UUID and by index as text: both are names in a manifest.

    Where parts are among those wanted, all parts too. Errors of `gpus`, and of NVML where it is asked.
    """
    present = gpus(folder)
    found = {gpu.uuid: gpu for gpu in present} | {str(gpu.index): gpu for gpu in present}
    for state in states() if _names_part(wanted) else ():
        if (whole := found.get(state.uuid)) is not None:
            for part in state.parts:
                numbers = _capabilities(capabilities / f"gpu{whole.minor}", part)
                found[part.uuid] = Gpu(whole.index, part.uuid, part.model, whole.minor, numbers)
    return found


def resolve(
    wanted: Sequence[int | str],
    *,
    folder: Path = DRIVER_FOLDER,
    states: Callable[[], Sequence[GpuState]] = gpu_states,
) -> tuple[str, ...]:
    """Return the UUIDs of GPUs named by index or UUID; ConfigError for one that is not here, or named twice.

    A part of a GPU goes by its own UUID, MIG-...: those are in no file, so NVML is asked where one is wanted.
    """
    present = gpus(folder)
    parts = _parts(states()) if _names_part(wanted) else {}
    uuids: list[str] = []
    for name in wanted:
        if str(name).startswith(PART_PREFIX):
            uuids.append(_part(str(name), parts, taken=uuids))
            continue
        match = next((gpu for gpu in present if name in (gpu.index, gpu.uuid)), None)
        if match is None:
            have = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in present) or "none"
            raise ConfigError(f"GPU {name} is not on this host", hint=f"GPUs here: {have}")
        if match.uuid in uuids:
            raise ConfigError(f"GPU {name} is named twice: it is {match.index} and {match.uuid}")
        uuids.append(match.uuid)
    return tuple(uuids)


def _names_part(wanted: Iterable[int | str]) -> bool:
    return any(str(name).startswith(PART_PREFIX) for name in wanted)


def _capabilities(gpu: Path, part: GpuPart) -> tuple[int, ...]:
    """Return the numbers of the nodes that open a part, of its GPU instance and of the compute instance in that.

    As NVIDIA's MIG user guide has it, "Device Nodes and Capabilities": each file has a line `DeviceFileMinor: N`.
    """
    instance = gpu / "mig" / f"gi{part.gpu_instance}"
    numbers = []
    for path in (instance / "access", instance / f"ci{part.compute_instance}" / "access"):
        try:
            facts = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            numbers.append(int(facts["DeviceFileMinor"]))
        except (OSError, KeyError, ValueError) as error:
            raise HostError(
                f"{path}: does not say which device node opens {part.uuid}: {error}", hint="is it being taken apart?"
            ) from error
    return tuple(numbers)


def _part(name: str, parts: dict[str, str], *, taken: Sequence[str]) -> str:
    if name not in parts:
        have = ", ".join(f"{uuid} ({model})" for uuid, model in parts.items()) or "none"
        raise ConfigError(f"{name} is no part of a GPU of this host", hint=f"parts here: {have}")
    if name in taken:
        raise ConfigError(f"{name} is named twice")
    return name


def _parts(states: Sequence[GpuState]) -> dict[str, str]:
    """Return the model of each part of a divided GPU, by UUID."""
    return {part.uuid: part.model for state in states for part in state.parts}


def version(*packages: str) -> str:
    """Return the installed version of the first of these packages that is there, from its metadata."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ABSENT
