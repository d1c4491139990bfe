"""Engines in containers: what the manifest adds to the Quadlet template, and what has to be known of the host for it.

Podman's generator makes engine@MODEL.service of it at every daemon-reload. A drop-in where Podman reads them; before
that, from its first Quadlet on, the whole file.
"""

import grp
import pwd
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from appliance.errors import HostError
from appliance.host.unit_text import Files, Link, Setting, drop_in, quoted
from appliance.inventory import Gpu
from appliance.manifest.schema import Directories, Manifest, Model
from appliance.run import run

QUADLETS = PurePosixPath("etc/containers/systemd")
GENERATED = PurePosixPath("/run/systemd/generator")
# Not where Quadlet looks: it would make a template of it that takes the place of the native one.
TEMPLATE = PurePosixPath("/usr/local/share/appliance/engine@.container")
DROP_IN = "10-appliance.conf"

QUADLET_VERSION = (4, 4)
DROP_IN_VERSION = (5, 0)
USER = "appliance"

# Somebody else's files may be there too.
_MARK = "# Written by `appliance apply`"

Version = tuple[int, int]


@dataclass(frozen=True)
class ContainerHost:
    """The host's Podman, and the numbers of whom an engine runs as: an image has no such names."""

    version: Version
    uid: int
    gid: int
    # Of the manifest's group, where it is not the user's own.
    group: int | None
    # The template's text, for a Podman that reads no drop-ins.
    template: str = ""


def container_host(manifest: Manifest) -> ContainerHost | None:
    """Return what containers need to know of this host, None where the manifest has none; HostError if it cannot."""
    names = [name for name, model in manifest.models.items() if model.engine.runtime == "podman"]
    if not names:
        return None
    what = f"model {names[0]!r} wants a container"
    version = podman_version()
    if version is None:
        raise HostError(
            f"{what}, and there is no Podman here", hint="apt-get install podman, or engine.runtime: native"
        )
    if version < QUADLET_VERSION:
        raise HostError(
            f"{what}, and Podman {version[0]}.{version[1]} has no Quadlet to start it with",
            hint=f"upgrade to Podman {DROP_IN_VERSION[0]}.{DROP_IN_VERSION[1]} or later, or engine.runtime: native",
        )
    try:
        user = pwd.getpwnam(USER)
        group = None if manifest.group in (None, USER) else grp.getgrnam(str(manifest.group)).gr_gid
        template = "" if version >= DROP_IN_VERSION else Path(TEMPLATE).read_text()
    except KeyError as error:
        raise HostError(f"{what}: {error.args[0]}", hint="install.sh makes the user; systemd-sysusers does") from error
    except OSError as error:
        raise HostError(f"cannot read {TEMPLATE}: {error.strerror}", hint="install.sh puts it there") from error
    return ContainerHost(version, user.pw_uid, user.pw_gid, group, template)


def podman_version() -> Version | None:
    """Return the version of the Podman on this host, None where there is none; HostError if it does not run."""
    if shutil.which("podman") is None:
        return None
    found = re.search(r"(\d+)\.(\d+)", run(["podman", "--version"], timeout_s=20).stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def container_files(name: str, source: PurePosixPath, settings: Iterator[Setting], host: ContainerHost) -> Files:
    """Map the paths of one engine's Quadlet files, relative to the host's root, to their contents."""
    file = QUADLETS / f"engine@{name}.container"
    text = drop_in(source, settings)
    if host.version < DROP_IN_VERSION:
        # Of two values of one setting the last counts.
        return {file: f"{host.template}\n{text}"}
    return {file: Link(str(TEMPLATE)), file.with_name(f"{file.name}.d") / DROP_IN: text}


def present_container_files(root: Path) -> Files:
    """Return what an earlier `apply` left of such files below a root."""
    files: Files = {}
    for path in (root / QUADLETS).glob("engine@*.container"):
        if path.is_symlink():
            if path.readlink() == Path(TEMPLATE):
                files[PurePosixPath(path.relative_to(root))] = Link(str(TEMPLATE))
        elif path.is_file() and _MARK in (text := path.read_text()):
            files[PurePosixPath(path.relative_to(root))] = text
    for path in (root / QUADLETS).glob(f"engine@*.container.d/{DROP_IN}"):
        files[PurePosixPath(path.relative_to(root))] = path.read_text()
    return files


def container_settings(
    model: Model, name: str, manifest: Manifest, gpus: dict[str, Gpu], host: ContainerHost
) -> Iterator[Setting]:
    """Yield what [Container] says of one model."""
    engine = model.engine
    yield "Container", "Image", str(engine.image)
    yield "Container", "User", str(host.uid)
    yield "Container", "Group", str(host.gid)
    if host.group is not None:
        yield "Container", "GroupAdd", str(host.group)
    for folder, mode in _folders(model, name, manifest):
        path = str(folder).replace("%", "%%")
        yield "Container", "Volume", f"{path}:{path}{mode}"
    for variable, value in (*engine.thread_environment.items(), *engine.environment.items()):
        # It ends up on a command line of systemd's, which would put variables of its own there.
        yield "Container", "Environment", quoted(f"{variable}={value}".replace("$", "$$"))
    for wanted in model.gpus:
        # A GPU that this host does not have is refused by `plan` and `apply`.
        if (gpu := gpus.get(str(wanted))) is not None:
            yield "Container", "AddDevice", f"nvidia.com/gpu={gpu.uuid}"
    if engine.cpus:
        yield "Container", "PodmanArgs", f"--cpuset-cpus={','.join(map(str, sorted(engine.cpus)))}"
    yield "Container", "HealthCmd", f"python3 -m appliance.engine.alive {engine.base_url}/health"


def _folders(model: Model, name: str, manifest: Manifest) -> Iterator[tuple[PurePosixPath | Path, str]]:
    """Yield each folder that a container gets beside those of the template, and how."""
    for checkpoint in model.checkpoints:
        yield checkpoint, ":ro"
    if manifest.trust.policy == "signed":
        for path in manifest.trust.keys:
            yield path, ":ro"
    default, directories = Directories(), manifest.directories
    if directories.runtime != default.runtime:
        yield directories.runtime / name, ":ro"
    if directories.state != default.state:
        yield directories.state, ""
    if directories.cache != default.cache:
        yield directories.cache, ""
