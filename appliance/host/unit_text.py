"""The text of unit files, as systemd and Quadlet read it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath


@dataclass(frozen=True)
class Link:
    """A symbolic link, by what it points to."""

    to: str


Files = dict[PurePosixPath, "str | Link"]
Setting = tuple[str, str, str]


def heading(source: PurePath) -> str:
    """Return the first line of every file that a manifest led to."""
    return f"# Written by `appliance apply` from {source}: edit that file, not this one."


def quoted(text: str) -> str:
    """Return a value that systemd reads back as exactly this text; systemd.syntax(7), and `%` for specifiers."""
    escapes = {"\\": "\\\\", '"': '\\"', "%": "%%"}
    # Systemd ends a line at each of \n, \r and NUL.
    escapes |= {chr(code): f"\\x{code:02x}" for code in (*range(1, 32), 127)}
    return '"' + "".join(escapes.get(c, c) for c in text) + '"'


def drop_in(source: PurePosixPath, settings: Iterable[Setting]) -> str:
    """Return a drop-in with these settings, in this order; one of a section begins where the section changes."""
    lines = [heading(source), "[Unit]", f"SourcePath={source}"]
    section = "Unit"
    for group, name, value in settings:
        if group != section:
            section = group
            lines += ["", f"[{group}]"]
        lines.append(f"{name}={value}")
    return "\n".join(lines) + "\n"
