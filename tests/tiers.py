"""What a tier of tests needs. One that cannot run here fails where CI=true and skips, saying why, elsewhere."""

import os
from pathlib import Path
from shutil import which
from typing import NoReturn

import pytest

HOST_PROGRAMS = ("systemd-nspawn", "debootstrap", "unshare", "nsenter", "setpriv")


def cannot_run(reason: str) -> NoReturn:
    """Fail in CI, where everything must run; skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"cannot run in CI: {reason}", pytrace=False)
    pytest.skip(reason)


def host_lacks() -> str | None:
    """Return what keeps this machine from booting a systemd host, or None."""
    if os.geteuid() != 0:
        return "booting a systemd host needs root"
    missing = [program for program in HOST_PROGRAMS if which(program) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def gpu_lacks() -> str | None:
    """Return what keeps this machine from running on a GPU, or None."""
    return None if Path("/dev/nvidiactl").exists() else "there is no NVIDIA GPU"


LACKING = {"host": host_lacks, "gpu": gpu_lacks}
