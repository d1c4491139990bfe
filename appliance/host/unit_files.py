"""What a manifest adds to the template units: drop-ins, enablement links, and the copy that units read. Writes nothing.

The templates in units/ are complete by themselves. A drop-in holds what differs from model to model: settings of
systemd's, and below [X-Appliance], which systemd ignores, every setting of the manifest that its process reads. So a
difference between two drop-ins says what has to restart, and why.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath

import yaml

from appliance.inventory import Gpu
from appliance.manifest.schema import Directories, Manifest, Model

UNITS = PurePosixPath("etc/systemd/system")
TEMPLATES = PurePosixPath("/usr/local/lib/systemd/system")
APPLIED = PurePosixPath("var/lib/appliance-host/appliance.yaml")
DROP_IN = "10-appliance.conf"
TARGET = "appliance.target"

OWN_GROUP = "appliance"
# For imports and compilation, on top of waiting for weights.
OWN_START_S = 600.0

GPU_CONTROL_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")

# What the two processes of a model read. A change of one of these restarts that process, and of nothing else.
KEEPER_SETTINGS = ("checkpoint", "revision", "dtype", "quantization", "parallel", "gpus", "draft", "health")
ENGINE_SETTINGS = ("engine", "mode", "on_miss", "wait_s", "verify")
# Of the keeper's settings, those that its engine has to follow.
SHAPING_SETTINGS = frozenset(KEEPER_SETTINGS) - {"health"}


@dataclass(frozen=True)
class Link:
    """A symbolic link, by what it points to."""

    to: str


Files = dict[PurePosixPath, "str | Link"]
Setting = tuple[str, str, str]


def unit_files(manifest: Manifest, source: PurePosixPath, gpus: dict[str, Gpu]) -> Files:
    """Map each path, relative to the host's root, to its contents.

    `source` is the manifest's own path; `gpus` are the host's by UUID and by index as text, for their device nodes.
    """
    files: Files = {APPLIED: applied_manifest(manifest, source)}
    wants = UNITS / f"{TARGET}.wants"
    for name, model in sorted(manifest.models.items()):
        settings = {"weights": _weights(model, manifest, gpus), "engine": _engine(model, manifest, gpus)}
        for kind, lines in settings.items():
            unit = unit_name(kind, name)
            files[UNITS / f"{unit}.d" / DROP_IN] = _drop_in(source, lines)
            files[wants / unit] = Link(str(TEMPLATES / f"{kind}@.service"))
        if manifest.trust.policy == "signed":
            for suffix in ("path", "timer"):
                watch = f"checkpoint@{escaped(name)}.{suffix}"
                files[UNITS / f"{unit_name('weights', name)}.wants" / watch] = Link(
                    str(TEMPLATES / f"checkpoint@.{suffix}")
                )
            files[UNITS / f"checkpoint@{escaped(name)}.path.d" / DROP_IN] = _drop_in(source, _watch(model))
    return files


def unit_name(kind: str, model: str) -> str:
    """Return a model's unit: `weights@MODEL.service` or `engine@MODEL.service`."""
    return f"{kind}@{escaped(model)}.service"


def escaped(model: str) -> str:
    """Return a model's name as an instance name. A name of the manifest needs no escapes: `%i` is the name itself."""
    return model


def applied_manifest(manifest: Manifest, source: PurePosixPath) -> str:
    """Return the copy that units read, so that an edit counts only once it has been applied."""
    text = yaml.safe_dump(manifest.model_dump(mode="json", by_alias=True, exclude_none=False), sort_keys=False)
    return f"{heading(source)}\n{text}"


def heading(source: PurePath) -> str:
    """Return the first line of every file that a manifest led to."""
    return f"# Written by `appliance apply` from {source}: edit that file, not this one."


def quoted(text: str) -> str:
    """Return a value that systemd reads back as exactly this text; systemd.syntax(7), and `%` for specifiers."""
    escapes = {"\\": "\\\\", '"': '\\"', "%": "%%"}
    # Systemd ends a line at each of \n, \r and NUL.
    escapes |= {chr(code): f"\\x{code:02x}" for code in (*range(1, 32), 127)}
    return '"' + "".join(escapes.get(c, c) for c in text) + '"'


def _weights(model: Model, manifest: Manifest, gpus: dict[str, Gpu]) -> Iterator[Setting]:
    yield from _access(manifest)
    yield from _devices(model, gpus)
    yield from _recorded(model, KEEPER_SETTINGS)
    yield "X-Appliance", "trust.policy", manifest.trust.policy
    yield "X-Appliance", "group", manifest.group or "none"


def _engine(model: Model, manifest: Manifest, gpus: dict[str, Gpu]) -> Iterator[Setting]:
    engine = model.engine
    yield "Service", "TimeoutStartSec", f"{model.wait_s + OWN_START_S:g}s"
    yield from _access(manifest)
    if engine.cpus:
        yield "Service", "CPUAffinity", " ".join(map(str, sorted(engine.cpus)))
    for variable, value in (*engine.thread_environment.items(), *engine.environment.items()):
        yield "Service", "Environment", quoted(f"{variable}={value}")
    yield from _devices(model, gpus)
    yield from _recorded(model, ENGINE_SETTINGS)
    yield "X-Appliance", "trust.policy", manifest.trust.policy


def _access(manifest: Manifest) -> Iterator[Setting]:
    """What a process may enter beyond what the templates say."""
    default = Directories()
    for setting in Directories.model_fields:
        if (folder := getattr(manifest.directories, setting)) != getattr(default, setting):
            # Made by whoever set it: systemd makes the default ones.
            yield "Service", "ReadWritePaths", quoted(f"-{folder}")
    if manifest.group not in (None, OWN_GROUP):
        yield "Service", "SupplementaryGroups", str(manifest.group)


def _watch(model: Model) -> Iterator[Setting]:
    yield "Path", "PathChanged", str(model.checkpoint).replace("%", "%%")


def _devices(model: Model, gpus: dict[str, Gpu]) -> Iterator[Setting]:
    if not model.gpus:
        return
    for device in GPU_CONTROL_DEVICES:
        yield "Service", "DeviceAllow", f"{device} rw"
    for wanted in model.gpus:
        # A GPU that this host does not have is reported by `plan`; its device node cannot be named.
        if (gpu := gpus.get(str(wanted))) is not None:
            yield "Service", "DeviceAllow", f"/dev/nvidia{gpu.minor} rw"


def _recorded(model: Model, names: tuple[str, ...]) -> Iterator[Setting]:
    data = model.model_dump(mode="json")
    for name in names:
        yield from _flat(name, data[name])


def _flat(name: str, value: object) -> Iterator[Setting]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    elif value not in (None, [], ""):
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield "X-Appliance", name, " ".join(text.split())


def _drop_in(source: PurePosixPath, settings: Iterator[Setting]) -> str:
    lines = [heading(source), "[Unit]", f"SourcePath={source}"]
    section = "Unit"
    for group, name, value in settings:
        if group != section:
            section = group
            lines += ["", f"[{group}]"]
        lines.append(f"{name}={value}")
    return "\n".join(lines) + "\n"
