"""A host with the appliance installed by install.sh from this checkout, small signed models, and requests that run."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from appliance.checkpoint.keys import generate_key, load_private_key
from appliance.checkpoint.signature import sign
from tests.host.machine import Completed, Machine
from tests.host.root import Kind
from tests.vllm.vllm_process import vllm_home

CHECKOUT = Path(__file__).resolve().parents[2]
SHIPPED = (
    "appliance",
    "container",
    "units",
    "etc",
    "install.sh",
    "constraints.txt",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
INSTALL_TIMEOUT_S = 900.0
START_TIMEOUT_S = 120.0
MODEL = "m"
PORT, OTHER_PORT, HEALTH_PORT = 18001, 18002, 19001
PLACE = "/root/checkout"
PYTHON_PLACE = "/opt/python"
VLLM_PLACE = "/opt/vllm"
MANIFEST = "/etc/appliance/appliance.yaml"
APPLIED = "/var/lib/appliance-host/appliance.yaml"


class Host:
    """An installed host, and what its tests ask it."""

    def __init__(self, machine: Machine, keys: Path, scratch: Path) -> None:
        self.machine = machine
        self._keys = keys
        self._scratch = scratch

    def put_checkpoint(self, checkpoint: Path, name: str = MODEL, *, signed: bool = True) -> None:
        """Copy a checkpoint in, over an older one; `signed`: with a new signature."""
        folder = self._scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkpoint, folder)
        for file in folder.iterdir():
            # Weights are written for their owner alone.
            file.chmod(0o644)
        if signed:
            sign(folder, load_private_key(self._keys / "signer.key"))
        self.machine.copy_in(folder, f"/srv/models/{name}")

    def put_manifest(self, models: dict[str, dict[str, Any]]) -> None:
        self.machine.write(MANIFEST, yaml.safe_dump({"models": models}))

    def apply(self) -> str:
        return self.appliance("apply", timeout_s=START_TIMEOUT_S).stdout

    def appliance(self, *arguments: str, check: bool = True, timeout_s: float = START_TIMEOUT_S) -> Completed:
        return self.machine.run(["appliance", *arguments], check=check, timeout_s=timeout_s)

    def status(self, name: str = MODEL) -> dict[str, Any]:
        """Return what the keeper says of itself."""
        # Of what runs: the operator's manifest may be ahead of it, or broken.
        found = json.loads(self.appliance("status", "--json", "--manifest", APPLIED).stdout)["models"][name]
        assert isinstance(found, dict)
        return found

    def shard_ids(self, name: str = MODEL) -> list[str]:
        """Return which shards are resident. Each load makes a new one."""
        return [shard["shard_id"] for shard in self.status(name)["shards"]]

    def pid(self, unit: str) -> int:
        return int(self.machine.show(unit, "MainPID")["MainPID"])

    def state(self, unit: str) -> str:
        return self.machine.show(unit, "ActiveState")["ActiveState"]

    def wait_for_state(self, unit: str, state: str = "active") -> None:
        what = f"{unit} is {state}"
        self.machine.wait_for(lambda: self.state(unit) == state, what=what, timeout_s=START_TIMEOUT_S)

    def held_bytes(self) -> int:
        """Return the size of all slabs that some process of the host, PID 1 included, has open or mapped."""
        return sum(json.loads(self.machine.run(["python3", "-c", _COUNT]).stdout).values())


# Each memory file once, whoever holds it: {inode: bytes}.
_COUNT = r"""
import json, os, glob, re
found = {}
for entry in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        if os.readlink(entry).startswith("/memfd:weights-"):
            status = os.stat(entry)
            found[status.st_ino] = status.st_blocks * 512
    except OSError:
        pass
for path in glob.glob("/proc/[0-9]*/maps"):
    try:
        for line in open(path):
            if "/memfd:weights-" in line:
                words = line.split()
                begin, end = (int(word, 16) for word in words[0].split("-"))
                found.setdefault(int(words[4]), end - begin)
    except OSError:
        pass
print(json.dumps(found))
"""


@contextmanager
def installed(kind: Kind, folder: Path) -> Iterator[Host]:
    """Yield a booted host on which `sudo ./install.sh` has run, and which trusts a new key."""
    generate_key(folder / "signer.key")
    with Machine.boot(kind, binds=python_and_pip(), network="host") as machine:
        make_python_usable(machine)
        copy_checkout(machine)
        install(machine)
        machine.copy_in(folder / "signer.pub", "/etc/appliance/trust/signer.pub")
        yield Host(machine, folder, folder / "checkpoints")


def copy_checkout(machine: Machine) -> None:
    for name in SHIPPED:
        machine.copy_in(CHECKOUT / name, f"{PLACE}/{name}")


def install(machine: Machine, *arguments: str, place: str = PLACE, network: bool = True, extras: str = "") -> str:
    """Run the install.sh of a place in there, with the Python of this test run, and return what it said."""
    environment = {"PYTHON": _python()} | ({"APPLIANCE_EXTRAS": extras} if extras else {})
    if network:
        environment |= pip_environment()
    command = [*([] if network else ["unshare", "--net"]), f"{place}/install.sh", *arguments]
    return machine.run(command, timeout_s=INSTALL_TIMEOUT_S, environment=environment).stderr


def pip_environment() -> dict[str, str]:
    """Return the variables that pip is set up with here."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def python_and_pip() -> dict[Path, str]:
    """Return what of this machine has to be in there for the same Python and the same package sources."""
    binds = {folder: str(folder) for folder in _pip_folders()}
    if not _is_debians():
        # Where its users cannot look, in somebody's home, it would be of no use to the appliance's user.
        binds[Path(sys.base_prefix)] = PYTHON_PLACE
    for packages in (vllm_home().parent / "lib").glob("python3.*/site-packages"):
        binds[packages] = VLLM_PLACE
    return binds


def make_python_usable(machine: Machine) -> None:
    """Have that Python find its own library, which it looks for in the place that it was built for."""
    if not _is_debians():
        machine.write("/etc/ld.so.conf.d/python.conf", f"{PYTHON_PLACE}/lib\n")
        machine.run(["ldconfig"])


def _python() -> str:
    if _is_debians():
        return "python3"
    return f"{PYTHON_PLACE}/bin/python3.{sys.version_info[1]}"


def _is_debians() -> bool:
    return Path(sys.base_prefix) == Path("/usr")


def _pip_folders() -> list[Path]:
    """Return the folders that pip's configuration names, and the one that it is in."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    words = said.stdout.replace("'", " ").replace("file://", " ").split()
    places = [Path(word) for word in words if word.startswith("/")] + [Path("/etc/xdg/pip")]
    # An index of files links to files beside it.
    folders = {
        place if place.is_dir() and place.name != "simple" else place.parent for place in places if place.exists()
    }
    return sorted(folder for folder in folders if not folder.is_relative_to("/usr"))
