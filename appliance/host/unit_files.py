"""What a manifest adds to the template units: drop-ins, enablement links, and the copy that units read. Writes nothing.

The templates in units/ are complete by themselves. A drop-in holds what differs from model to model: settings of
systemd's, and below [X-Appliance], which systemd ignores, every setting of the manifest that its process reads. So a
difference between two drop-ins says what has to restart, and why.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import yaml

from appliance import inventory
from appliance.host.containers import GENERATED, ContainerHost, container_files, container_host, container_settings
from appliance.host.unit_text import Files, Link, Setting, drop_in, heading, quoted
from appliance.inventory import Gpu
from appliance.manifest.schema import Directories, Manifest, Model
from appliance.manifest.shaping import shaping_arguments, shaping_variables

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
SHAPING_SETTINGS = frozenset({*KEEPER_SETTINGS, "engine"}) - {"health"}


def wanted_files(manifest: Manifest, path: Path) -> Files:
    """Return the `unit_files` of a manifest on this host; HostError where its GPUs or its Podman cannot be known."""
    containers = container_host(manifest)
    gpus = inventory.by_name(manifest.gpus())
    return unit_files(manifest, PurePosixPath(path.absolute()), gpus, containers=containers)


def unit_files(
    manifest: Manifest, source: PurePosixPath, gpus: dict[str, Gpu], *, containers: ContainerHost | None = None
) -> Files:
    """Map each path, relative to the host's root, to its contents.

    `source` is the manifest's own path; `gpus` are the host's as `inventory.by_name` tells them, for device nodes;
    `containers` is what containers need to know of the host, and may be left out where the manifest has none.
    """
    files: Files = {APPLIED: applied_manifest(manifest, source)}
    wants = UNITS / f"{TARGET}.wants"
    for name, model in sorted(manifest.models.items()):
        weights, engine = unit_name("weights", name), unit_name("engine", name)
        files[UNITS / f"{weights}.d" / DROP_IN] = drop_in(source, _weights(model, manifest, gpus))
        files[wants / weights] = Link(str(TEMPLATES / "weights@.service"))
        if model.engine.runtime == "podman":
            if containers is None:
                raise ValueError(f"model {name!r} wants a container, on a host of which nothing is known")
            settings = _container(model, name, manifest, gpus, containers)
            files |= container_files(escaped(name), source, settings, containers)
            files[wants / engine] = Link(str(GENERATED / engine))
        else:
            files[UNITS / f"{engine}.d" / DROP_IN] = drop_in(source, _engine(model, manifest, gpus))
            files[wants / engine] = Link(str(TEMPLATES / "engine@.service"))
        if manifest.trust.policy == "signed":
            for suffix in ("path", "timer"):
                watch = f"checkpoint@{escaped(name)}.{suffix}"
                files[UNITS / f"{unit_name('weights', name)}.wants" / watch] = Link(
                    str(TEMPLATES / f"checkpoint@.{suffix}")
                )
            files[UNITS / f"checkpoint@{escaped(name)}.path.d" / DROP_IN] = drop_in(source, _watch(model))
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


def _weights(model: Model, manifest: Manifest, gpus: dict[str, Gpu]) -> Iterator[Setting]:
    yield from _access(manifest)
    yield from _devices(model, gpus)
    yield from _recorded(model, KEEPER_SETTINGS)
    # Each kind has a loader of its own.
    yield "X-Appliance", "engine.kind", model.engine.kind
    if model.engine.kind == "vllm":
        if arguments := shaping_arguments(model.engine.args):
            yield "X-Appliance", "engine.args", " ".join(" ".join(arguments).split())
        for name in shaping_variables(model.engine.environment):
            yield "X-Appliance", f"engine.environment.{name}", " ".join(model.engine.environment[name].split())
    yield "X-Appliance", "trust.policy", manifest.trust.policy
    yield "X-Appliance", "group", manifest.group or "none"


def _container(
    model: Model, name: str, manifest: Manifest, gpus: dict[str, Gpu], host: ContainerHost
) -> Iterator[Setting]:
    yield from container_settings(model, name, manifest, gpus, host)
    yield from _start(model)
    yield from _recorded(model, ENGINE_SETTINGS)
    yield "X-Appliance", "trust.policy", manifest.trust.policy


def _engine(model: Model, manifest: Manifest, gpus: dict[str, Gpu]) -> Iterator[Setting]:
    engine = model.engine
    yield from _start(model)
    yield from _access(manifest)
    if engine.cpus:
        yield "Service", "CPUAffinity", " ".join(map(str, sorted(engine.cpus)))
    for variable, value in (*engine.thread_environment.items(), *engine.environment.items()):
        yield "Service", "Environment", quoted(f"{variable}={value}")
    yield from _devices(model, gpus)
    yield from _recorded(model, ENGINE_SETTINGS)
    yield "X-Appliance", "trust.policy", manifest.trust.policy


def _start(model: Model) -> Iterator[Setting]:
    yield "Service", "TimeoutStartSec", f"{model.wait_s + OWN_START_S:g}s"


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
    for checkpoint in model.checkpoints:
        yield "Path", "PathChanged", str(checkpoint).replace("%", "%%")


def _devices(model: Model, gpus: dict[str, Gpu]) -> Iterator[Setting]:
    if not model.gpus:
        return
    for device in GPU_CONTROL_DEVICES:
        yield "Service", "DeviceAllow", f"{device} rw"
    for wanted in model.gpus:
        # A GPU that this host does not have is refused by `plan` and `apply`; for another host, its node is not known.
        if (gpu := gpus.get(str(wanted))) is not None:
            for device, access in gpu.devices.items():
                yield "Service", "DeviceAllow", f"{device} {access}"


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
