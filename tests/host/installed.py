"""A host with the appliance installed by install.sh from this checkout, a small signed model, and requests that run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from appliance.checkpoint.keys import generate_key, load_private_key
from appliance.checkpoint.signature import sign
from tests.host.machine import Machine
from tests.host.root import Kind

CHECKOUT = Path(__file__).resolve().parents[2]
SHIPPED = ("appliance", "units", "etc", "install.sh", "constraints.txt", "pyproject.toml", "README.md", "LICENSE")
INSTALL_TIMEOUT_S = 900.0
MODEL = "m"
PORT = 8001
PYTHON_PLACE = "/opt/python"


@contextmanager
def installed(kind: Kind, keys: Path) -> Iterator[Machine]:
    """Yield a booted host on which `sudo ./install.sh` has run; the key pair is new, its private half in `keys`."""
    generate_key(keys / "signer.key")
    with Machine.boot(kind, binds=python_and_pip(), network="host") as machine:
        make_python_usable(machine)
        for name in SHIPPED:
            machine.copy_in(CHECKOUT / name, f"/root/checkout/{name}")
        install(machine)
        machine.copy_in(keys / "signer.pub", "/etc/appliance/trust/signer.pub")
        yield machine


def install(machine: Machine, *arguments: str) -> str:
    """Run install.sh in there, with the Python of this test run, and return what it said."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment["PYTHON"] = _python()
    done = machine.run(["/root/checkout/install.sh", *arguments], timeout_s=INSTALL_TIMEOUT_S, environment=environment)
    return done.stderr


def put_checkpoint(machine: Machine, checkpoint: Path, keys: Path, name: str = MODEL) -> None:
    """Sign a checkpoint here and put it in there, in the place of an older one, as a copy of files would."""
    sign(checkpoint, load_private_key(keys / "signer.key"))
    machine.copy_in(checkpoint, f"/srv/models/{name}")


def put_manifest(machine: Machine, models: dict[str, dict[str, Any]] | None = None, **settings: Any) -> None:
    """Write the manifest in there: one model, or these."""
    one: dict[str, Any] = {MODEL: {"checkpoint": f"/srv/models/{MODEL}", "engine": {"port": PORT}, **settings}}
    machine.write("/etc/appliance/appliance.yaml", yaml.safe_dump({"models": one if models is None else models}))


def status(machine: Machine, name: str = MODEL) -> dict[str, Any]:
    answer = json.loads(machine.run(["appliance", "status", "--json"]).stdout)
    found = answer["models"][name]
    assert isinstance(found, dict)
    return found


def python_and_pip() -> dict[Path, str]:
    """Return what of this machine has to be in there for the same Python and the same package sources."""
    binds = {folder: str(folder) for folder in _pip_folders()}
    if not _is_debians():
        # Where its users cannot look, in somebody's home, it would be of no use to the appliance's user.
        binds[Path(sys.base_prefix)] = PYTHON_PLACE
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
    folders = {place if place.is_dir() and place.name != "simple" else place.parent for place in places if place.exists()}
    return sorted(folder for folder in folders if not folder.is_relative_to("/usr"))
