import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from appliance import gpus, inventory
from appliance.checkpoint.keys import generate_key
from appliance.host import doctor
from appliance.host.doctor import Finding, Level, examine
from tests.systemd.manifests import manifest_of


@pytest.fixture
def site(tmp_path: Path) -> Path:
    generate_key(tmp_path / "signer.key")
    (tmp_path / "checkpoint").mkdir()
    models = {"m": {"checkpoint": str(tmp_path / "checkpoint"), "engine": {"port": 8001}}}
    trust = {"keys": [str(tmp_path / "signer.pub")]}
    manifest_of(tmp_path, models, trust=trust, directories={"runtime": str(tmp_path / "run")}, group=None)
    return tmp_path / "appliance.yaml"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Put programs that print something before those of this machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name: str, prints: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\nprintf '%s\\n' '{prints}'\n")
        (folder / name).chmod(0o755)

    yield put


def found(site: Path, words: str) -> Finding:
    """Return the one finding that has these words in it."""
    [finding] = [finding for finding in examine(site) if words in finding.what]
    return finding


def booted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) == "/run/systemd/system" or real(path))


@pytest.mark.parametrize(
    ("version", "level"),
    [("systemd 249 (249)", Level.FAIL), ("systemd 252 (252.39)", Level.NOTE), ("systemd 257 (257.1)", Level.OK)],
)
def test_the_version_of_systemd(
    site: Path, program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, version: str, level: Level
) -> None:
    program("systemctl", version)
    booted(monkeypatch)
    finding = found(site, version.partition(" (")[0])
    assert finding.level is level and bool(finding.fix) is (level is not Level.OK)


def test_systemd_that_is_not_pid_1(site: Path, program: Callable[[str, str], None]) -> None:
    program("systemctl", "systemd 257 (257.1)")
    if Path("/run/systemd/system").is_dir():
        pytest.skip("it is, here")
    assert found(site, "not PID 1").level is Level.FAIL


@pytest.mark.parametrize(
    ("said", "level", "words"),
    [
        ("podman version 4.3.1", Level.NOTE, "no Quadlet"),
        ("podman version 4.9.3", Level.NOTE, "no drop-ins"),
        ("podman version 5.4.2", Level.OK, "Podman 5.4 with Quadlet"),
    ],
)
def test_the_version_of_podman(
    site: Path, program: Callable[[str, str], None], said: str, level: Level, words: str
) -> None:
    program("podman", said)
    assert found(site, words).level is level


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes")
def test_a_gpu_that_a_reload_may_take_away_from_a_container(
    site: Path, program: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("podman", "podman version 5.4.2")
    monkeypatch.setattr(inventory, "gpus", lambda *folder: {} if folder else {"GPU-x": None})
    monkeypatch.setattr(gpus, "gpu_states", list)
    devices = tmp_path / "dev"
    (devices / "char").mkdir(parents=True)
    # With the number of /dev/null: nobody can do anything with it.
    os.mknod(devices / "nvidia0", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    monkeypatch.setattr(doctor, "DEVICES", devices)
    assert found(site, "no link in /dev/char to nvidia0").level is Level.NOTE
    (devices / "char/1:3").symlink_to("../nvidia0")
    assert not any("/dev/char" in finding.what for finding in examine(site))


def test_a_low_limit_of_open_files(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1024))
    assert found(site, "open files").level is Level.FAIL


def test_a_clock_that_starts_in_1970(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert found(site, "the clock says").level is Level.FAIL


@pytest.mark.parametrize(("mode", "level"), [(True, Level.OK), (False, Level.FAIL)])
def test_persistence_mode(site: Path, monkeypatch: pytest.MonkeyPatch, mode: bool, level: Level) -> None:
    gpu = SimpleNamespace(index=0, model="H200", free_bytes=1 << 30, persistence_mode=mode)
    monkeypatch.setattr(inventory, "gpus", lambda *folder: {} if folder else {"GPU-x": gpu})
    monkeypatch.setattr(gpus, "gpu_states", lambda: [gpu])
    assert found(site, "persistence mode").level is level


def test_a_broken_manifest_is_a_finding_and_the_host_is_looked_at_all_the_same(site: Path) -> None:
    site.write_text("models: [\n")
    findings = examine(site)
    assert findings[-1].level is Level.FAIL and "manifest" in findings[-1].what
    assert any("memory" in finding.what for finding in findings)


def test_a_key_that_is_not_there(site: Path, tmp_path: Path) -> None:
    (tmp_path / "signer.pub").unlink()
    assert found(site, "signer.pub").level is Level.FAIL


def test_unsigned_checkpoints_are_pointed_out(site: Path) -> None:
    body = yaml.safe_load(site.read_text()) | {"trust": {"policy": "local"}}
    site.write_text(yaml.safe_dump(body))
    assert found(site, "checkpoints are unsigned").level is Level.NOTE


def test_a_checkpoint_that_is_not_there(site: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").rmdir()
    assert found(site, "is not there").level is Level.FAIL


def test_a_checkpoint_on_a_remote_file_system(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_mounts", lambda: [(str(tmp_path), "nfs4"), ("/", "ext4")])
    assert found(site, "nfs4").level is Level.NOTE


def test_a_checkpoint_that_the_keepers_user_may_not_read(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Temporary folders of tests are their user's alone, and so what is in them cannot be read.
    monkeypatch.setattr(doctor, "USER", "nobody")
    finding = found(site, "cannot read")
    assert finding.level is Level.FAIL and finding.fix.startswith("chmod")


def test_a_socket_for_everybody(site: Path, tmp_path: Path) -> None:
    socket = tmp_path / "run" / "m" / "keeper.sock"
    assert found(site, "no keeper's socket").level is Level.NOTE
    socket.parent.mkdir(parents=True)
    socket.touch(mode=0o660)
    assert found(site, "for its group only").level is Level.OK
    socket.chmod(0o666)
    assert found(site, "everybody may connect").level is Level.FAIL


def test_units_that_are_not_as_the_manifest_says(site: Path) -> None:
    assert found(site, "differ from the manifest").fix == "appliance apply"


def test_what_is_not_right_has_a_fix(site: Path) -> None:
    assert [finding for finding in examine(site) if finding.level is not Level.OK and not finding.fix] == []
