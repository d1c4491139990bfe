"""install.sh into a folder, as for an image: what lands where, and what a second run and an uninstall leave."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
# pip runs twice.
pytestmark = pytest.mark.timeout(900)

LANDED = (
    "etc/appliance/appliance.yaml",
    "etc/appliance/trust",
    "opt/appliance/current/bin/python",
    "usr/local/bin/appliance",
    "usr/local/lib/systemd/system/appliance.target",
    "usr/local/lib/systemd/system/checkpoint@.path",
    "usr/local/lib/systemd/system/checkpoint@.service",
    "usr/local/lib/systemd/system/checkpoint@.timer",
    "usr/local/lib/systemd/system/engine-stop@.service",
    "usr/local/lib/systemd/system/engine@.service",
    "usr/local/lib/systemd/system/engine@.service.d/backoff.conf",
    "usr/local/lib/systemd/system/weights@.service",
    "usr/local/lib/systemd/system/weights@.service.d/backoff.conf",
    "usr/local/share/appliance/engine@.container",
    "usr/local/lib/sysusers.d/appliance.conf",
    "usr/local/lib/tmpfiles.d/appliance.conf",
)


def install(dest: Path, *arguments: str) -> str:
    # Without torch: where its files land is pip's affair.
    environment: dict[str, str] = dict(os.environ) | {
        "DESTDIR": str(dest),
        "APPLIANCE_EXTRAS": "cuda",
        "PYTHON": _python(),
    }
    command = [str(CHECKOUT / "install.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def _python() -> str:
    """Return the Python that this one is a virtual environment of."""
    return str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}"))


@pytest.fixture(scope="module")
def dest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("image")
    install(dest)
    return dest


def exists(dest: Path, name: str) -> bool:
    current = dest / "opt/appliance/current"
    if current.is_symlink():
        # A link to where it will be on the host.
        name = name.replace("opt/appliance/current", str(current.readlink()).lstrip("/"))
    return os.path.lexists(dest / name)


def test_everything_lands_below_the_folder_and_runs(dest: Path) -> None:
    assert [name for name in LANDED if not exists(dest, name)] == []
    [release] = (dest / "opt/appliance/releases").iterdir()
    said = subprocess.run(
        [release / "bin/python", "-m", "appliance", "--version"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert said.stdout.startswith("appliance ")
    assert (dest / "usr/local/bin/appliance").read_text().splitlines()[-1].startswith("exec /opt/appliance/current/")


def test_an_edited_manifest_is_kept_and_uninstalling_leaves_it(dest: Path) -> None:
    manifest = dest / "etc/appliance/appliance.yaml"
    manifest.write_text("models: {}  # edited\n")
    key = dest / "etc/appliance/trust/signer.pub"
    key.write_text("a key\n")
    assert "kept /etc/appliance/appliance.yaml" in install(dest)
    assert manifest.read_text() == "models: {}  # edited\n"
    quadlets = dest / "etc/containers/systemd"
    (quadlets / "engine@m.container.d").mkdir(parents=True)
    (quadlets / "engine@m.container").symlink_to("/usr/local/share/appliance/engine@.container")
    (quadlets / "engine@whole.container").write_text(
        "[Unit]\n\n# Written by `appliance apply` from /etc/x: edit that\n"
    )
    (quadlets / "engine@theirs.container").write_text("[Container]\nImage=theirs\n")
    said = install(dest, "--uninstall")
    assert [path.name for path in quadlets.iterdir()] == ["engine@theirs.container"]
    assert "Left: /etc/appliance" in said and manifest.exists() and key.exists()
    assert [name for name in LANDED if exists(dest, name) and not name.startswith("etc/")] == []
