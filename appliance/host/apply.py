"""Carries out a plan: files all or none, then one daemon-reload, then exactly the units that changed."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.errors import ApplianceError, HostError
from appliance.host.plan import Action, Change, Plan
from appliance.host.systemctl import NOT_LOADED, RELOAD_TIMEOUT_S, START_TIMEOUT_S, systemctl
from appliance.host.unit_text import Link


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
    failures: dict[str, str] = {}
    for action in plan.actions:
        # An engine waits for weights, and attaches whenever they come: nobody has to wait with it.
        wait = not any(unit.startswith("weights@") and _model(unit) == _model(action.unit) for unit in failures)
        if (error := _act(action, tell, wait=wait)) is not None:
            failures[action.unit] = error.message
    if failures:
        units = " ".join(f"-u {unit}" for unit in failures)
        raise HostError("; ".join(failures.values()), hint=f"journalctl {units} says more")


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


def _act(action: Action, tell: Callable[[str], None], *, wait: bool) -> ApplianceError | None:
    tell(str(action))
    with contextlib.suppress(ApplianceError):  # it was never loaded
        systemctl("reset-failed", action.unit, timeout_s=RELOAD_TIMEOUT_S)
    try:
        # What was stopped before, and is not installed any more, is not even loaded.
        accept = (0, NOT_LOADED) if action.verb == "stop" else (0,)
        block = [] if wait else ["--no-block"]
        systemctl(*block, str(action.verb), action.unit, timeout_s=START_TIMEOUT_S, accept=accept)
    except ApplianceError as error:
        return error
    return None


def _model(unit: str) -> str:
    return unit.partition("@")[2].rpartition(".")[0]


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
