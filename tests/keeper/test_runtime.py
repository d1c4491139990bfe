"""A model's runtime directory belongs to one keeper, and nobody else can put anything into it."""

import fcntl
import grp
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.descriptors import Descriptor
from appliance.errors import HostError, ResourceError
from appliance.keeper.runtime import LOCK_NAME, listen, locked
from tests.descriptors import count_descriptors

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's part can only be played by root")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_second_keeper_is_refused_by_naming_the_first(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "m", gid=None),
        pytest.raises(ResourceError, match=rf"another keeper \(pid {os.getpid()}\) serves {tmp_path}/m"),
        locked(tmp_path / "m", gid=None),
    ):
        pytest.fail("it was let in")


def test_the_lock_ends_with_its_keeper_and_not_with_its_file(tmp_path: Path) -> None:
    code = "import os, signal; from appliance.keeper import runtime; from pathlib import Path\n"
    code += f"with runtime.locked(Path({str(tmp_path / 'm')!r}), gid=None): os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (tmp_path / "m" / LOCK_NAME).exists()
    with locked(tmp_path / "m", gid=None):
        assert (tmp_path / "m" / LOCK_NAME).read_text() == f"{os.getpid()}\n"


def test_a_longer_pid_of_an_earlier_keeper_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("999999999999\n")
    with locked(tmp_path, gid=None):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"


def test_a_refused_keeper_leaves_the_lock_as_it_was(tmp_path: Path) -> None:
    before = count_descriptors()
    with locked(tmp_path, gid=None):
        with pytest.raises(ResourceError), locked(tmp_path, gid=None):
            pass
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        with pytest.raises(ResourceError), locked(tmp_path, gid=None):
            pass
    assert count_descriptors() == before


def test_the_directory_is_for_its_owner_and_one_group(tmp_path: Path) -> None:
    with locked(tmp_path / "run" / "m", gid=None):
        assert mode(tmp_path / "run" / "m") == 0o750
        assert mode(tmp_path / "run" / "m" / LOCK_NAME) == 0o600


def test_a_directory_of_ours_that_others_could_enter_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m").chmod(0o777)
    with locked(tmp_path / "m", gid=None):
        assert mode(tmp_path / "m") == 0o750


@as_root
def test_the_group_of_the_manifest_may_enter(tmp_path: Path) -> None:
    gid = grp.getgrnam("nogroup").gr_gid
    with locked(tmp_path / "m", gid=gid), listen(tmp_path / "m" / "keeper.sock", gid=gid):
        assert (tmp_path / "m").stat().st_gid == gid
        assert (tmp_path / "m" / "keeper.sock").stat().st_gid == gid
        assert (tmp_path / "m" / LOCK_NAME).stat().st_gid != gid


@as_root
def test_a_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.chown(tmp_path / "m", NOBODY, NOBODY)
    with (
        pytest.raises(HostError, match=r"belongs to user 65534 .*others could put a socket of theirs there"),
        locked(tmp_path / "m", gid=None),
    ):
        pytest.fail("it was used")


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / LOCK_NAME).symlink_to(victim)
    with pytest.raises(HostError, match=r"cannot use .*keeper\.lock"), locked(tmp_path / "m", gid=None):
        pytest.fail("it was followed")
    assert victim.read_text() == "precious"


def test_a_runtime_directory_that_cannot_be_made_is_an_error_of_the_host() -> None:
    with pytest.raises(HostError, match="cannot use /proc/appliance"), locked(Path("/proc/appliance/m"), gid=None):
        pytest.fail("it was made")


def test_a_file_in_the_place_of_the_directory_is_an_error_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("")
    with pytest.raises(HostError, match="cannot use"), locked(tmp_path / "m", gid=None):
        pytest.fail("it was used")


# Imports first: another user may not be able to read this Python.
LOCK_AS_NOBODY = """
import os, sys
from pathlib import Path
from appliance.errors import HostError
from appliance.keeper.runtime import locked
os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    with locked(Path(sys.argv[1]), gid=None):
        pass
except HostError as error:
    print(error)
    sys.exit(error.exit_status)
"""


@as_root
def test_a_runtime_directory_that_is_not_ours_to_write_is_an_error_of_the_host(open_folder: Path) -> None:
    (open_folder / "m").mkdir(mode=0o755)
    command = [sys.executable, "-c", LOCK_AS_NOBODY, str(open_folder / "m")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == HostError.exit_status, ended.stderr
    assert "Permission denied" in ended.stdout


def test_the_socket_is_for_owner_and_group_whatever_the_umask(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        with listen(tmp_path / "keeper.sock", gid=None):
            assert mode(tmp_path / "keeper.sock") == 0o660
    finally:
        assert os.umask(old_mask) == 0


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    with listen(path, gid=None), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))


def test_a_link_in_the_place_of_the_socket_is_removed_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "keeper.sock").symlink_to(victim)
    with listen(tmp_path / "keeper.sock", gid=None):
        assert stat.S_ISSOCK((tmp_path / "keeper.sock").lstat().st_mode)
    assert victim.read_text() == "precious"


def test_what_cannot_be_listened_on_is_an_error_of_the_host(tmp_path: Path) -> None:
    before = count_descriptors()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "missing" / "keeper.sock", tmp_path / ("a" * 200)):
        with pytest.raises(HostError, match="cannot listen on"):
            listen(path, gid=None)
    assert count_descriptors() == before


def test_neither_lock_nor_socket_outlive_an_exec(tmp_path: Path) -> None:
    with locked(tmp_path, gid=None), listen(tmp_path / "keeper.sock", gid=None) as listener:
        assert not listener.get_inheritable()
        with Descriptor(os.open(tmp_path / LOCK_NAME, os.O_RDONLY)) as probe, pytest.raises(BlockingIOError):
            fcntl.flock(probe.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        fds = [path for path in Path("/proc/self/fd").iterdir() if path.exists() and path.resolve().name == LOCK_NAME]
        assert fds
        assert not any(os.get_inheritable(int(path.name)) for path in fds)
