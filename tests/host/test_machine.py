"""The hosts that the systemd tests run on: what they are, that they stay apart, and that nothing of them is left."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.cgroup import wait_until_empty
from tests.host.machine import Machine
from tests.host.root import RELEASES, Kind

SERVICE = Path(__file__).with_name("keeps_descriptor.py")
UNIT = """
[Service]
Type=notify
ExecStart=python3 /opt/keeps_descriptor.py hello
Restart=always
RestartSec=0
FileDescriptorStoreMax=8
"""

# The first boot builds the root file system.
pytestmark = [pytest.mark.host, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=RELEASES)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(scope="module")
def machine(kind: Kind) -> Iterator[Machine]:
    with Machine.boot(kind) as machine:
        yield machine


def test_it_runs_the_systemd_it_is_for(machine: Machine, kind: Kind) -> None:
    versions = [machine.run([program, "--version"]).stdout.splitlines()[0] for program in ("systemctl", "python3")]
    print(f"{kind}: {'; '.join(versions)}")
    assert versions[0].split()[:2] == ["systemd", str(RELEASES[kind].systemd)]
    assert machine.systemctl("is-system-running") == "running"


def test_the_newer_one_has_podman_with_quadlet() -> None:
    with Machine.boot("trixie") as machine:
        print(machine.run(["podman", "--version"]).stdout)
        machine.run(["test", "-x", "/usr/lib/systemd/system-generators/podman-system-generator"])


def test_pid_1_keeps_a_descriptor_and_its_contents_while_its_service_comes_and_goes(machine: Machine) -> None:
    machine.copy_in(SERVICE, "/opt/keeps_descriptor.py")
    machine.write("/etc/systemd/system/keeps.service", UNIT)
    machine.systemctl("daemon-reload")
    machine.systemctl("start", "keeps.service")
    first = machine.show("keeps.service", "StatusText", "NFileDescriptorStore", "MainPID")
    assert (first["StatusText"], first["NFileDescriptorStore"]) == ("stored hello", "1")

    machine.systemctl("kill", "--signal=KILL", "keeps.service")
    machine.wait_for(
        lambda: machine.show("keeps.service", "StatusText")["StatusText"] == "got back hello",
        what="the killed service has its descriptor back",
    )
    killed = machine.show("keeps.service", "MainPID", "NRestarts")
    assert killed["NRestarts"] == "1" and killed["MainPID"] != first["MainPID"]

    for command in ("restart keeps.service", "daemon-reload", "daemon-reexec", "restart keeps.service"):
        machine.systemctl(*command.split())
        state = {"ActiveState": "active", "StatusText": "got back hello", "NFileDescriptorStore": "1"}
        assert machine.show("keeps.service", *state) == state, command

    machine.systemctl("stop", "keeps.service")
    assert machine.show("keeps.service", "NFileDescriptorStore")["NFileDescriptorStore"] == "0"


def test_a_file_and_a_directory_arrive_with_their_modes(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "program").write_text("#!/bin/sh\necho it runs\n")
    (tmp_path / "deep" / "program").chmod(0o750)
    machine.copy_in(tmp_path, "/srv/new/place")
    assert machine.run(["/srv/new/place/deep/program"]).stdout == "it runs\n"
    assert machine.run(["stat", "--format=%a %U", "/srv/new/place/deep/program"]).stdout == "750 root\n"


def test_a_link_in_the_path_leads_to_a_place_in_there(machine: Machine, tmp_path: Path) -> None:
    machine.run(["ln", "--symbolic", "--no-target-directory", tmp_path, "/srv/link"])
    machine.run(["mkdir", "--parents", tmp_path])
    machine.write("/srv/link/file", "in there")
    assert machine.run(["cat", tmp_path / "file"]).stdout == "in there"
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_fails_says_why_and_one_that_hangs_is_killed(machine: Machine) -> None:
    with pytest.raises(AssertionError, match=r"status 2\n.*nowhere"):
        machine.run(["ls", "/nowhere"])
    assert machine.run(["ls", "/nowhere"], check=False).returncode == 2
    with pytest.raises(subprocess.TimeoutExpired):
        machine.run(["sleep", "1000"], timeout_s=0.2)
    assert machine.run(["pgrep", "--exact", "sleep"], check=False).stdout == ""


def test_the_journal_of_a_unit_can_be_read(machine: Machine) -> None:
    machine.run(["systemd-run", "--wait", "--unit=says", "echo", "something to say"])
    assert "something to say" in machine.journal("says.service").splitlines()


def test_a_reboot_empties_run_and_keeps_the_disk(machine: Machine) -> None:
    machine.run(["touch", "/run/gone", "/etc/kept"])
    before = machine.init_pid
    machine.reboot()
    assert machine.init_pid != before
    assert machine.run(["ls", "/run/gone", "/etc/kept"], check=False).stdout == "/etc/kept\n"


def test_two_hosts_are_apart_from_each_other_and_from_this_one(machine: Machine, kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("outside")
    with Machine.boot(kind, binds={tmp_path: "/srv/out: side"}) as other:
        assert other.run(["cat", "/srv/out: side/file"]).stdout == "outside"
        assert other.run(["touch", "/srv/out: side/new"], check=False).returncode != 0
        other.run(["touch", "/etc/mine"])
        assert machine.run(["ls", "/etc/mine"], check=False).returncode != 0
        for each in (machine, other):  # one port, twice
            each.run(["systemd-run", "--unit=web", "python3", "-m", "http.server", "--bind", "127.0.0.1", "8000"])
            assert each.systemctl("is-active", "web") == "active"
        other.systemctl("stop", "web")
        assert machine.systemctl("is-active", "web") == "active"
        machine.systemctl("stop", "web")


def test_nothing_is_left_of_a_stopped_host(kind: Kind) -> None:
    with Machine.boot(kind) as machine:
        cgroup, init = machine._cgroup.path, os.pidfd_open(machine.init_pid)
        machine.run(["systemd-run", "sleep", "1000"])
    try:
        assert select.select([init], [], [], 0)[0], "its PID 1 is still there"
    finally:
        os.close(init)
    assert not cgroup.exists()
    assert "scratch" not in Path("/proc/self/mounts").read_text()


def test_nothing_runs_on_when_the_test_run_is_killed(kind: Kind) -> None:
    code = """
import signal, sys
from tests.host.machine import Machine
with Machine.boot(sys.argv[1]) as machine:
    print(machine.init_pid, machine._cgroup.path, flush=True)
    signal.pause()
"""
    argv = [sys.executable, "-c", code, kind]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as test_run:
        assert test_run.stdout is not None
        init_pid, cgroup = test_run.stdout.readline().split()
        init = os.pidfd_open(int(init_pid))
        try:
            test_run.send_signal(signal.SIGKILL)
            assert select.select([init], [], [], 30)[0], "its PID 1 is still there"
        finally:
            os.close(init)
    wait_until_empty(Path(cgroup), timeout_s=30)
    assert "scratch" not in Path("/proc/self/mounts").read_text()
    with Machine.boot(kind):  # tidies up
        assert not Path(cgroup).exists()
