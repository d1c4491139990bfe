"""Debian root file systems to boot: one for each systemd that is tested, built once and kept in the user's cache."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance.demo.cache import Progress, default_cache, filled
from appliance.run import run

Kind = Literal["trixie", "bookworm"]

BUILD_TIMEOUT_S = 1500.0


@dataclass(frozen=True)
class Release:
    """A Debian release, the systemd it has, and the packages that a host of it gets."""

    name: str
    systemd: int
    packages: tuple[str, ...]

    @property
    def recipe(self) -> str:
        """A digest of everything that decides what the root contains, the day's mirror aside."""
        return hashlib.sha256(repr((self, FILES, MASKED)).encode()).hexdigest()[:12]


_SYSTEM = ("systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "iproute2", "procps")
RELEASES: dict[Kind, Release] = {
    # Rootless Podman maps several users with uidmap. vLLM's build for a CPU links libnuma.
    "trixie": Release("trixie", 257, (*_SYSTEM, "podman", "crun", "netavark", "uidmap", "libnuma1")),
    # Its Podman has no Quadlet, and its units fail in a container.
    "bookworm": Release("bookworm", 252, _SYSTEM),
}

FILES = {
    # The control group tree in there has no controllers, and /proc/sys is the outer host's.
    "etc/containers/containers.conf": "[containers]\npids_limit=0\ndefault_sysctls=[]\n",
    "etc/hostname": "host\n",
    # Empty: each boot gets an identity of its own.
    "etc/machine-id": "",
    # Boots are told apart by their journal, which would be lost with /run.
    "etc/systemd/journald.conf.d/keep.conf": "[Journal]\nStorage=persistent\nRateLimitBurst=0\n",
}
# What has nothing to do in a container, and would leave the host `degraded`.
MASKED = (
    "systemd-modules-load.service",
    "console-getty.service",
    "getty.target",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "fstrim.timer",
    "e2scrub_all.timer",
    "dpkg-db-backup.timer",
)


def root(kind: Kind, *, on_progress: Progress) -> Path:
    """Return a root file system that nobody may write to: a boot lays its own changes over it. Needs root."""
    release = RELEASES[kind]

    def make(directory: Path) -> None:
        on_progress(f"building a Debian {release.name} host (a minute or two, once)")
        _debootstrap(release, directory)
        _configure(directory)

    return filled(default_cache() / "hosts" / f"{release.name}-{release.recipe}", make, on_progress=on_progress)


def _debootstrap(release: Release, directory: Path) -> None:
    # It mounts /proc in there. In namespaces of its own those mounts end with it, however it ends.
    apart = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
    packages = f"--include={','.join(release.packages)}"
    command = ["debootstrap", "--variant=minbase", packages, release.name, str(directory)]
    run([*apart, "--mount-proc", *command], timeout_s=BUILD_TIMEOUT_S)


def _configure(directory: Path) -> None:
    for path, text in FILES.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    for unit in MASKED:
        (directory / "etc/systemd/system" / unit).symlink_to("/dev/null")
    shutil.rmtree(directory / "var/cache/apt/archives", ignore_errors=True)
