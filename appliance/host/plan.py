"""The difference between a manifest and a host: which files change, what restarts, and why. Reads, never writes."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from appliance.host.containers import QUADLETS, present_container_files
from appliance.host.unit_files import APPLIED, DROP_IN, SHAPING_SETTINGS, TARGET, UNITS
from appliance.host.unit_text import Files, Link

# Drop-ins of these names, and links to these templates, are ours.
_KINDS = ("weights@", "engine@", "checkpoint@")


RUNTIME = "engine.runtime"


class Verb(StrEnum):
    """What is done to a unit; in the order of these members, engines before weights when stopping."""

    STOP = "stop"
    RESTART = "restart"
    START = "start"


@dataclass(frozen=True)
class Change:
    """One file: its contents before and after, None where it is not there."""

    path: PurePosixPath
    before: "str | Link | None"
    after: "str | Link | None"

    def diff(self) -> str:
        """Return a unified diff, as `diff -u` would print it."""
        lines = difflib.unified_diff(
            _lines(self.before), _lines(self.after), f"a/{self.path}", f"b/{self.path}", lineterm=""
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Action:
    """What is done to one unit, and the reason for people."""

    unit: str
    verb: Verb
    reason: str

    def __str__(self) -> str:
        return f"{self.verb} {self.unit}: {self.reason}"


@dataclass(frozen=True)
class Plan:
    """All of it; empty where the host is as the manifest says."""

    changes: tuple[Change, ...]
    actions: tuple[Action, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)


def make_plan(wanted: Files, root: Path) -> Plan:
    """Compare the wanted files with those below the host's root."""
    present = read_present(root)
    paths = sorted(wanted.keys() | present.keys())
    changes = tuple(
        Change(path, present.get(path), wanted.get(path)) for path in paths if present.get(path) != wanted.get(path)
    )
    return Plan(changes, tuple(_actions(changes, wanted)))


def read_present(root: Path) -> Files:
    """Return what an earlier `apply` left below a root."""
    files: Files = {}
    units = root / UNITS
    for kind in _KINDS:
        for path in units.glob(f"{kind}*.d/{DROP_IN}"):
            files[PurePosixPath(path.relative_to(root))] = path.read_text()
        for folder in (TARGET, "weights@*.service"):
            for path in units.glob(f"{folder}.wants/{kind}*"):
                if path.is_symlink():
                    files[PurePosixPath(path.relative_to(root))] = Link(str(path.readlink()))
    files |= present_container_files(root)
    if (applied := root / APPLIED).is_file():
        files[APPLIED] = applied.read_text()
    return files


def _actions(changes: tuple[Change, ...], wanted: Files) -> Iterator[Action]:
    """Engines stop before weights and start after them; an engine follows its weights where their bytes change."""
    by_path = {change.path: change for change in changes}
    links = [change for change in changes if _enables(change.path)]
    gone = [change.path.name for change in links if change.after is None]
    new = [change.path.name for change in links if change.before is None]
    yield from (Action(unit, Verb.STOP, "no longer in the manifest") for unit in sorted(gone, key=_engines_first))
    reshaped: set[str] = set()
    for unit in sorted(_units_of(wanted), key=_weights_first):
        if unit in new:
            yield Action(unit, Verb.START, "new in the manifest")
            continue
        model = unit.partition("@")[2].rpartition(".")[0]
        if differing := _differing([by_path[path] for path in _files_of(unit) if path in by_path]):
            if unit.startswith("weights@") and any(name.partition(".")[0] in SHAPING_SETTINGS for name in differing):
                reshaped.add(model)
            yield Action(unit, Verb.RESTART, "; ".join(differing.values()))
        elif unit.startswith("engine@") and model in reshaped:
            yield Action(unit, Verb.RESTART, "its weights change")


def _units_of(wanted: Files) -> list[str]:
    return [path.name for path in wanted if _enables(path)]


def _enables(path: PurePosixPath) -> bool:
    return path.parent.suffix == ".wants"


def _files_of(unit: str) -> list[PurePosixPath]:
    """Return where the settings of a unit may be: in a drop-in of its own, or in Quadlet files that it is made from."""
    container = QUADLETS / f"{unit.removesuffix('.service')}.container"
    files = [UNITS / f"{unit}.d" / DROP_IN, container.with_name(f"{container.name}.d") / DROP_IN, container]
    return files if unit.startswith("engine@") else files[:1]


def _differing(changes: list[Change]) -> dict[str, str]:
    """Return the settings that differ between all files before and after, each with a line for people."""
    before, after = (
        _settings([line for content in contents for line in _lines(content)])
        for contents in ([change.before for change in changes], [change.after for change in changes])
    )
    differing = {
        name: f"{name}: {' '.join(before.get(name, ['(none)']))} -> {' '.join(after.get(name, ['(none)']))}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and name != "SourcePath"
    }
    if RUNTIME in differing and before and after:
        # What systemd's settings and Podman's have to do with each other is nothing: the manifest's say it all.
        return {name: line for name, line in differing.items() if name[0].islower()}
    return differing


def _settings(lines: list[str]) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def _lines(content: "str | Link | None") -> list[str]:
    if content is None:
        return []
    return [f"-> {content.to}"] if isinstance(content, Link) else content.splitlines()


def _engines_first(unit: str) -> tuple[int, str]:
    return (("checkpoint@", "engine@", "weights@").index(unit.partition("@")[0] + "@"), unit)


def _weights_first(unit: str) -> tuple[int, str]:
    return (("weights@", "engine@", "checkpoint@").index(unit.partition("@")[0] + "@"), unit)
