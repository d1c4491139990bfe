import os
from pathlib import Path, PurePosixPath

import pytest

from appliance.errors import HostError
from appliance.host.apply import apply, write_files
from appliance.host.plan import Action, Change, Plan, Verb
from appliance.host.unit_text import Link

OLD, NEW = PurePosixPath("etc/old.conf"), PurePosixPath("etc/new.d/new.conf")
CHANGES = (
    Change(OLD, "before\n", "after\n"),
    Change(NEW, None, "new\n"),
    Change(PurePosixPath("etc/link"), Link("/there"), None),
)

# Writes down each call; fails where a file of that name says so, with the status in it or 1.
SYSTEMCTL = """#!/bin/sh
shift
echo "$*" >>"$CALLS/calls"
for word; do
    if [ -e "$CALLS/fails-$word" ]; then
        echo "no: $word" >&2
        read -r status <"$CALLS/fails-$word"
        exit "${status:-1}"
    fi
done
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / OLD).write_text("before\n")
    (root / "etc/link").symlink_to("/there")
    return root


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin/systemctl"
    program.parent.mkdir()
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path))
    return tmp_path


def state(root: Path) -> dict[str, str]:
    """Return every file, link and folder below the root."""
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    } | {str(path.relative_to(root)): "" for path in root.rglob("*") if path.is_dir() and not path.is_symlink()}


def test_files_and_links_are_made_changed_and_removed(root: Path) -> None:
    write_files(CHANGES, root)
    assert state(root) == {"etc": "", "etc/old.conf": "after\n", "etc/new.d": "", "etc/new.d/new.conf": "new\n"}
    assert (root / NEW).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("turn", range(3))
def test_a_failure_in_the_middle_leaves_everything_as_it_was(root: Path, turn: int) -> None:
    before = state(root)
    # A name too long for the file system fails at its turn, as a full disk would.
    broken = Change(PurePosixPath("etc", "x" * 300), None, "x")
    with pytest.raises(HostError, match="cannot write"):
        write_files([*CHANGES[:turn], broken, *CHANGES[turn:]], root)
    assert state(root) == before


def test_a_reload_that_fails_takes_the_files_back_and_starts_nothing(root: Path, calls: Path) -> None:
    before = state(root)
    (calls / "fails-daemon-reload").touch()
    plan = Plan(CHANGES, (Action("weights@m.service", Verb.START, "new"),))
    with pytest.raises(HostError, match="no: daemon-reload"):
        apply(plan, root, tell=lambda text: None)
    assert state(root) == before
    assert (calls / "calls").read_text().split() == ["daemon-reload", "daemon-reload"]


def test_units_are_acted_on_once_each_in_order_after_one_reload(root: Path, calls: Path) -> None:
    actions = (
        Action("engine@n.service", Verb.STOP, "gone"),
        Action("weights@m.service", Verb.RESTART, "dtype"),
        Action("engine@m.service", Verb.RESTART, "dtype"),
    )
    told: list[str] = []
    apply(Plan(CHANGES, actions), root, tell=told.append)
    said = [line for line in (calls / "calls").read_text().splitlines() if not line.startswith("reset-failed")]
    assert said == ["daemon-reload", *(f"{action.verb} {action.unit}" for action in actions)]
    assert told == [str(action) for action in actions]


def test_one_unit_that_does_not_start_keeps_no_other_from_it_and_its_engine_is_not_waited_for(
    root: Path, calls: Path
) -> None:
    units = ("weights@m.service", "engine@m.service", "weights@n.service")
    (calls / "fails-weights@m.service").touch()
    with pytest.raises(HostError, match=r"start weights@m\.service") as caught:
        apply(Plan(CHANGES, tuple(Action(unit, Verb.START, "new") for unit in units)), root, tell=lambda text: None)
    assert caught.value.hint == "journalctl -u weights@m.service says more"
    said = (calls / "calls").read_text().splitlines()
    assert "--no-block start engine@m.service" in said and "start weights@n.service" in said
    assert (root / OLD).read_text() == "after\n", "the files are as the manifest says"


def test_what_was_stopped_and_unloaded_before_counts_as_stopped_and_cannot_be_started(root: Path, calls: Path) -> None:
    (calls / "fails-checkpoint@m.path").write_text("5\n")
    apply(Plan(CHANGES, (Action("checkpoint@m.path", Verb.STOP, "gone"),)), root, tell=lambda text: None)
    with pytest.raises(HostError, match=r"start checkpoint@m\.path"):
        apply(Plan((), (Action("checkpoint@m.path", Verb.START, "new"),)), root, tell=lambda text: None)
