"""Carries out a plan: files all or none, then one daemon-reload, then exactly the units that changed."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.errors import ApplianceError, HostError
from appliance.host.plan import Action, Change, Plan, Verb
from appliance.host.unit_files import Link
from appliance.run import run

RELOAD_TIMEOUT_S = 60.0
ACTION_TIMEOUT_S = 3600.0


def apply(plan: Plan, root: Path, *, tell: Callable[[str], None]) -> None:
    """Make the host as planned. HostError with everything as it was where a file or the reload fails.

    A unit that does not start is reported after the others had their turn: the files stay, as the manifest says.
    """
    undo = write_files(plan.changes, root)
    try:
        systemctl("daemon-reload", timeout_s=RELOAD_TIMEOUT_S)
    except ApplianceError:
        undo()
        with contextlib.suppress(ApplianceError):
            systemctl("daemon-reload", timeout_s=RELOAD_TIMEOUT_S)
        raise
    failures = [str(error) for action in plan.actions if (error := _act(action, tell)) is not None]
    if failures:
        raise HostError("; ".join(failures), hint="journalctl -u UNIT says more")


def write_files(changes: Sequence[Change], root: Path) -> Callable[[], None]:
    """Write every change below a root and return what takes them back; HostError with none of them made."""
    done: list[Change] = []

    def undo() -> None:
        for change in reversed(done):
            _put(root / change.path, change.before)

    try:
        for change in changes:
            _put(root / change.path, change.after)
            done.append(change)
    except OSError as error:
        with contextlib.suppress(OSError):
            undo()
        raise HostError(f"cannot write {error.filename}: {error.strerror}", hint="are you root?") from error
    return undo


def systemctl(*arguments: str, timeout_s: float) -> str:
    """Run systemctl and return its output; HostError with its last line where it fails."""
    return run(["systemctl", "--no-ask-password", *arguments], timeout_s=timeout_s).stdout


def _act(action: Action, tell: Callable[[str], None]) -> ApplianceError | None:
    tell(str(action))
    try:
        if action.verb is not Verb.STOP:
            # A unit that failed too often would not be started again.
            systemctl("reset-failed", action.unit, timeout_s=RELOAD_TIMEOUT_S)
    except ApplianceError:
        pass  # it was never loaded
    try:
        systemctl(str(action.verb), action.unit, timeout_s=ACTION_TIMEOUT_S)
    except ApplianceError as error:
        return error
    return None


def _put(path: Path, content: "str | Link | None") -> None:
    if content is None:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: somebody else's drop-ins are there
            path.parent.rmdir()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.new")
    staged.unlink(missing_ok=True)
    if isinstance(content, Link):
        staged.symlink_to(content.to)
    else:
        with staged.open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.chmod(0o644)
    staged.replace(path)
