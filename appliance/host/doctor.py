"""`appliance doctor`: what this host lacks to keep weights resident, each finding with its fix. Changes nothing."""

import os
import pwd
import re
import resource
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from appliance import __version__, gpus, inventory
from appliance.checkpoint.keyring import Keyring
from appliance.errors import ApplianceError
from appliance.host.containers import DROP_IN_VERSION, QUADLET_VERSION, USER, podman_version
from appliance.host.plan import make_plan
from appliance.host.unit_files import wanted_files
from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest
from appliance.quantities import format_size
from appliance.run import run

STORE_PRESERVE_VERSION = 254  # FileDescriptorStorePreserve=
OLDEST_VERSION = 252
WANTED_FILES = 4096
# A build date says that a clock before it is wrong, whatever a time server thinks.
EARLIEST_CLOCK = 1_764_000_000.0
DEVICES = Path("/dev")
SLOW_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse", "ceph", "9p", "virtiofs", "fuse.sshfs"})


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what to do where it is not right."""

    level: Level
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what}" + (f"\n      fix: {self.fix}" if self.fix else "")

    def to_json(self) -> dict[str, str]:
        return {"level": str(self.level), "what": self.what, "fix": self.fix}


def examine(path: Path) -> list[Finding]:
    """Return every finding; a manifest that is broken is one of them, and ends what depends on it."""
    findings = [*_systemd(), *_limits(), *_clock(), *_gpus(), *_podman()]
    try:
        manifest = load_manifest(path)
    except ApplianceError as error:
        return [*findings, Finding(Level.FAIL, f"manifest: {error.message}", error.hint or f"appliance check {path}")]
    findings.append(Finding(Level.OK, f"manifest {path}: {len(manifest.models)} models"))
    for check in (_keys, _checkpoints, _sockets):
        findings += check(manifest)
    return [*findings, *_drift(manifest, path)]


def _systemd() -> Iterator[Finding]:
    try:
        words = run(["systemctl", "--version"], timeout_s=10).stdout.split()
    except ApplianceError as error:
        yield Finding(Level.FAIL, f"systemd: {error.message}", "without systemd there is `appliance up`")
        return
    found = re.search(r"\d+", words[1]) if len(words) > 1 else None
    version = int(found[0]) if found else 0
    if not Path("/run/systemd/system").is_dir():
        yield Finding(
            Level.FAIL, f"systemd {version} is installed, but is not PID 1", "boot with it, or use `appliance up`"
        )
    elif version < OLDEST_VERSION:
        yield Finding(Level.FAIL, f"systemd {version}", f"upgrade to {OLDEST_VERSION} or later")
    elif version < STORE_PRESERVE_VERSION:
        yield Finding(
            Level.NOTE,
            f"systemd {version}: weights survive crashes and restarts of their keeper, but it does not tell how many "
            "descriptors it keeps, and restarts what keeps dying without slowing down",
            f"upgrade to {STORE_PRESERVE_VERSION} or later",
        )
    else:
        yield Finding(Level.OK, f"systemd {version} keeps descriptors over restarts")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < WANTED_FILES:
        yield Finding(Level.FAIL, f"at most {hard} open files", "raise DefaultLimitNOFILE= in system.conf")
    else:
        yield Finding(Level.OK, f"open files: {soft}, at most {hard}")
    memory = _meminfo()
    yield Finding(Level.OK, f"memory: {format_size(memory['MemAvailable'])} of {format_size(memory['MemTotal'])} free")


def _clock() -> Iterator[Finding]:
    if time.time() < EARLIEST_CLOCK:
        yield Finding(Level.FAIL, f"the clock says {time.ctime()}", "set it: file times decide what is verified again")
    else:
        yield Finding(Level.OK, f"clock: {time.ctime()}")


def _gpus() -> Iterator[Finding]:
    if not inventory.gpus():
        yield Finding(Level.NOTE, "no NVIDIA GPU: weights are kept in host memory", "install the driver, for GPUs")
        return
    try:
        states = gpus.gpu_states()
    except ApplianceError as error:
        yield Finding(Level.FAIL, f"GPUs: {error.message}", error.hint or "nvidia-smi says more")
        return
    for state in states:
        name = f"GPU {state.index} ({state.model}, {format_size(state.free_bytes)} free)"
        if state.persistence_mode is False:
            yield Finding(
                Level.FAIL,
                f"{name}: persistence mode is off: the driver may drop weights that only PID 1 holds",
                "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1",
            )
        else:
            yield Finding(Level.OK, f"{name}: persistence mode is on")


def _podman() -> Iterator[Finding]:
    try:
        version = podman_version()
    except ApplianceError as error:
        yield Finding(Level.FAIL, f"Podman: {error.message}", "reinstall it, or remove it")
        return
    if version is None:
        yield Finding(Level.NOTE, "no Podman: engines run as native units", "apt-get install podman, for containers")
        return
    text = f"Podman {version[0]}.{version[1]}"
    if version < QUADLET_VERSION:
        yield Finding(Level.NOTE, f"{text} has no Quadlet", "upgrade to 5.0 or later for engines in containers")
    elif version < DROP_IN_VERSION:
        yield Finding(Level.NOTE, f"{text} reads no drop-ins of Quadlet files", "upgrade to 5.0 or later")
    else:
        yield Finding(Level.OK, f"{text} with Quadlet")
    if not inventory.gpus():
        return
    if not any(list(Path(folder).glob("nvidia*")) for folder in ("/etc/cdi", "/var/run/cdi")):
        yield Finding(
            Level.NOTE,
            "no CDI description of the GPUs: containers cannot get them",
            "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    if unnamed := _without_link(DEVICES):
        yield Finding(
            Level.NOTE,
            f"no link in /dev/char to {' '.join(unnamed)}: systemd cannot name these devices, and a daemon-reload may "
            "take them away from a running container",
            "nvidia-ctk system create-dev-char-symlinks --create-all",
        )


def _without_link(devices: Path) -> list[str]:
    """Return the GPU device nodes that systemd does not find by their number, as it looks for them at each reload."""
    unnamed = []
    for node in sorted(devices.glob("nvidia*")):
        found = node.stat()
        if stat.S_ISCHR(found.st_mode) and not (devices / f"char/{_number(found.st_rdev)}").exists():
            unnamed.append(node.name)
    return unnamed


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _keys(manifest: Manifest) -> Iterator[Finding]:
    if manifest.trust.policy != "signed":
        yield Finding(Level.NOTE, "trust.policy is local: checkpoints are unsigned and pinned by this host")
        return
    try:
        names = ", ".join(key.name for key in Keyring.load(manifest.trust.keys).keys)
        yield Finding(Level.OK, f"trusted keys: {names}")
    except ApplianceError as error:
        yield Finding(Level.FAIL, error.message, error.hint or "put the signer's public key where trust.keys says")


def _checkpoints(manifest: Manifest) -> Iterator[Finding]:
    mounts = _mounts()
    for name, model in manifest.models.items():
        path = model.checkpoint
        if not path.is_dir():
            yield Finding(Level.FAIL, f"{name}: checkpoint {path} is not there", "mount or copy it")
            continue
        if (unreadable := _unreadable(path)) is not None:
            yield Finding(Level.FAIL, f"{name}: user {USER} cannot read {unreadable}", f"chmod --recursive o+rX {path}")
            continue
        kind = next((kind for point, kind in mounts if path.resolve().is_relative_to(point)), "?")
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        text = f"{name}: checkpoint {path}: {format_size(size)} on {kind}"
        if kind in SLOW_FILE_SYSTEMS or kind.startswith("fuse"):
            yield Finding(Level.NOTE, text, "a remote file system: use `verify: signature` where a stat is slow")
        else:
            yield Finding(Level.OK, text)


def _unreadable(checkpoint: Path) -> Path | None:
    """Return what the keeper's user may not read, the first there is; None also where we cannot tell."""
    try:
        user = pwd.getpwnam(USER)
    except KeyError:
        return None
    groups = set(os.getgrouplist(USER, user.pw_gid))

    def bits(path: Path) -> int:
        found = path.stat()
        shift = 6 if found.st_uid == user.pw_uid else 3 if found.st_gid in groups else 0
        return found.st_mode >> shift

    try:
        folder = checkpoint.resolve()
        for path in (*reversed(folder.parents), folder):
            if not bits(path) & 0o1:
                return path
        return next((path for path in sorted(folder.rglob("*")) if not bits(path) & 0o4), None)
    except OSError:
        return None


def _sockets(manifest: Manifest) -> Iterator[Finding]:
    for name in manifest.models:
        path = manifest.socket_path(name)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            yield Finding(
                Level.NOTE, f"{name}: no keeper's socket at {path}: {error.strerror}", f"systemctl start weights@{name}"
            )
            continue
        if stat.S_IMODE(mode) & 0o007:
            yield Finding(Level.FAIL, f"{path}: everybody may connect", f"chmod o= {path}")
        else:
            yield Finding(Level.OK, f"{name}: {path} is for its group only")


def _drift(manifest: Manifest, path: Path) -> Iterator[Finding]:
    try:
        found = make_plan(wanted_files(manifest, path), Path("/"))
    except ApplianceError as error:
        yield Finding(Level.FAIL, f"units: {error.message}", error.hint or "appliance plan says more")
        return
    except OSError as error:
        yield Finding(Level.NOTE, f"units: {error}", "run this as root")
        return
    if found:
        yield Finding(Level.NOTE, f"units: {len(found.changes)} files differ from the manifest", "appliance apply")
    else:
        yield Finding(Level.OK, f"units are as the manifest says (appliance {__version__})")


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def _mounts() -> list[tuple[str, str]]:
    """Return mount points and file systems, the longest first."""
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return sorted(((words[1], words[2]) for words in lines), key=lambda mount: -len(mount[0]))
