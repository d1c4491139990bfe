"""How much host memory this process may still take: the machine's, and that of every control group above it."""

import errno
from pathlib import Path

from appliance.errors import HostError, ResourceError

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_bytes(*, meminfo: Path = _MEMINFO, own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> int:
    """Return the bytes that can be allocated without swapping or killing; HostError if the kernel does not tell.

    MemAvailable of proc(5), and for each control group (version 2) memory.max less what is in use and cannot be
    reclaimed. Groups of version 1 are not looked at.
    """
    available = _machine_bytes(meminfo)
    group = _own_group(own_group, groups)
    while group is not None and group.is_relative_to(groups):
        available = min(available, _group_bytes(group, available))
        group = group.parent
    return max(0, available)


def _machine_bytes(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except OSError as error:
        kind = ResourceError if error.errno in (errno.EMFILE, errno.ENFILE) else HostError
        raise kind(f"cannot read {meminfo}: {error.strerror}") from error
    except (ValueError, IndexError) as error:
        raise HostError(f"cannot read {meminfo}: {error}") from error
    raise HostError(f"{meminfo} does not say MemAvailable")


def _own_group(own_group: Path, groups: Path) -> Path | None:
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return None
    # Version 2 is the line "0::/path", cgroups(7).
    return next((groups / line[3:].lstrip("/") for line in lines if line.startswith("0::")), None)


def _group_bytes(group: Path, unlimited_bytes: int) -> int:
    try:
        limit_bytes = int((group / "memory.max").read_text())  # "max" where there is no limit
        used_bytes = int((group / "memory.current").read_text())
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable_bytes = int(fields["inactive_file"]) + int(fields["slab_reclaimable"])
    except (OSError, ValueError, KeyError):
        return unlimited_bytes
    return limit_bytes - used_bytes + reclaimable_bytes
