import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.errors import HostError, ResourceError
from appliance.up.lock import claim, prepare


def test_the_second_to_claim_a_directory_is_told_who_has_it(folder: Path) -> None:
    _, lock = claim(folder)
    with lock, pytest.raises(ResourceError, match=f"{folder}: process {os.getpid()} supervises") as caught:
        claim(folder)
    assert caught.value.hint is not None


def test_a_claim_ends_with_its_lock(folder: Path) -> None:
    for _ in range(2):
        claim(folder)[1].close()


def test_a_claim_ends_with_its_process_however_that_ends(folder: Path) -> None:
    code = (
        "import os, sys; sys.path[:] = sys.argv[2].split(':')\n"
        "from pathlib import Path\n"
        "from appliance.up.lock import claim\n"
        "kept = claim(Path(sys.argv[1])); print(os.getpid(), flush=True); os.kill(os.getpid(), 9)\n"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, str(folder), ":".join(sys.path)]
    done = subprocess.run(argv, check=False, capture_output=True, timeout=30)
    assert (folder / ".up" / "lock").read_bytes() == done.stdout
    claim(folder)[1].close()


def test_the_supervisors_folder_is_its_users_alone(folder: Path) -> None:
    (folder / ".up").mkdir(mode=0o777)
    own, lock = claim(folder)
    lock.close()
    assert own == folder / ".up"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


@pytest.mark.parametrize("there", ["file", "link"])
def test_something_else_in_its_place_is_refused(folder: Path, there: str) -> None:
    if there == "file":
        (folder / ".up").touch()
    else:
        (folder / "elsewhere").mkdir()
        (folder / ".up").symlink_to(folder / "elsewhere")
    with pytest.raises(HostError, match=r"\.up"):
        claim(folder)


def test_a_link_in_place_of_the_lock_is_not_followed(folder: Path) -> None:
    (folder / ".up").mkdir()
    (folder / ".up" / "lock").symlink_to(folder / "victim")
    with pytest.raises(HostError):
        claim(folder)
    assert not (folder / "victim").exists()


def test_missing_directories_are_made(folder: Path) -> None:
    prepare(folder / "run" / "appliance", folder / "state")
    assert (folder / "run" / "appliance").is_dir() and (folder / "state").is_dir()


def test_a_directory_that_cannot_be_made_is_named_with_a_way_out(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(HostError, match="file/run: cannot be made") as caught:
        prepare(folder, folder / "file" / "run")
    assert caught.value.hint is not None and "directories" in caught.value.hint


def test_a_directory_that_this_user_may_not_write_to_is_named_with_a_way_out(folder: Path) -> None:
    (folder / "state").mkdir(mode=0o555)
    code = (
        "import os, sys; sys.path[:] = sys.argv[2].split(':')\n"
        "from pathlib import Path\n"
        "from appliance.errors import HostError\n"
        "from appliance.up.lock import prepare\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: prepare(Path(sys.argv[1]))\n"
        "except HostError as error: print(error)\n"
    )
    folder.chmod(0o755)
    argv = [sys.executable, "-I", "-S", "-c", code, str(folder / "state"), ":".join(sys.path)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30)
    assert f"{folder}/state: not writable by user" in done.stdout
    assert "hint: " in done.stdout
