"""install.sh --bundle: one archive, and a host without a network that it installs on."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.systemd.test_install import CHECKOUT, LANDED, exists

# pip runs twice.
pytestmark = pytest.mark.timeout(900)

PODMAN = """#!/bin/sh
case $1 in
save) echo "image ${5}" >"$4" ;;
image) test "$3" != localhost/absent:1 ;;
*) echo "$*" >>"$CALLS" ;;
esac
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables that install.sh is run with: a small part of the packages, and a Podman that writes down calls."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "podman"
    program.write_text(PODMAN)
    program.chmod(0o755)
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")
    settings = {"APPLIANCE_EXTRAS": "cuda", "PYTHON": str(python), "CALLS": str(folder / "calls")}
    return dict(os.environ) | settings | {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def unpacked(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    _run([CHECKOUT / "install.sh", "--bundle", "made.tar", "localhost/engine:1"], folder, environment)
    with tarfile.open(folder / "made.tar") as archive:
        archive.extractall(folder, filter="data")
    return folder / "appliance"


def test_it_holds_every_package_and_image_and_nothing_of_the_checkouts_own(unpacked: Path) -> None:
    wheels = {wheel.name.partition("-")[0] for wheel in unpacked.glob("wheels/*.whl")}
    assert {"appliance", "pydantic", "cuda_bindings", "aiohttp"} <= wheels
    assert (unpacked / "images/1.tar").read_text() == "image localhost/engine:1\n"
    files = {path.name for path in unpacked.iterdir()}
    assert files.isdisjoint({".git", "tests", ".venv", "build"}) and not list(unpacked.rglob("__pycache__"))


def test_it_installs_with_no_network(unpacked: Path, environment: dict[str, str], tmp_path: Path) -> None:
    # No package source but the bundle, whatever pip is set up with here.
    offline = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
    offline |= {"DESTDIR": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:1/"}
    del offline["APPLIANCE_EXTRAS"]
    _run([unpacked / "install.sh"], tmp_path, offline)
    assert [name for name in LANDED if not exists(tmp_path, name)] == []
    [release] = (tmp_path / "opt/appliance/releases").iterdir()
    _run([release / "bin/python", "-c", "import appliance.cli.main, cuda.bindings"], tmp_path, offline)


def test_a_bundle_says_which_python_it_is_for(unpacked: Path, environment: dict[str, str], tmp_path: Path) -> None:
    written = unpacked / "wheels/python"
    before = written.read_text()
    assert before == f"3.{sys.version_info[1]}\n"
    written.write_text("3.99\n")
    try:
        command = [unpacked / "install.sh"]
        settings = {name: value for name, value in environment.items() if name != "PYTHON"} | {"DESTDIR": str(tmp_path)}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    finally:
        written.write_text(before)
    assert done.returncode == 69 and "no Python 3.99 here, which this bundle is for" in done.stderr


def test_an_image_that_is_not_there_is_said_before_anything_is_fetched(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command: list[str | Path] = [CHECKOUT / "install.sh", "--bundle", "made.tar"]
    command += ["localhost/engine:1", "localhost/absent:1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 69 and "there is no image localhost/absent:1 to pack" in done.stderr
    assert "fetching" not in done.stderr and not list(tmp_path.iterdir())


def _run(command: list[str | Path], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
