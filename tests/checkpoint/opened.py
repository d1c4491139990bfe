"""Which regular files this process opens, seen by an audit hook."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_active: list[tuple[Path, list[str]]] = []
_installed: list[bool] = []


@contextmanager
def files_opened(below: Path) -> Iterator[list[str]]:
    """Collect the names, relative to `below`, of the files that are opened there meanwhile, each as often as it is."""
    if not _installed:
        sys.addaudithook(_note)  # there is no way to remove one
        _installed.append(True)
    found: list[str] = []
    _active.append((below, found))
    try:
        yield found
    finally:
        _active.pop()


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or not _active or not isinstance(arguments[0], str | os.PathLike):
        return
    path = Path(os.fspath(arguments[0]))
    for below, found in _active:
        if path.is_relative_to(below) and not path.is_dir():
            found.append(str(path.relative_to(below)))
