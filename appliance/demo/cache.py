"""Directories that take long to make: made once, whole or not at all, whoever asks and whoever is killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.errors import HostError

Progress = Callable[[str], None]


def default_cache() -> Path:
    """Return the folder below the user's cache where these directories are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of that variable says to ignore a relative path.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "appliance"


def filled(destination: Path, make: Callable[[Path], None], *, on_progress: Progress) -> Path:
    """Return `destination`, after `make(empty directory)` has filled it if it was not there.

    It appears under its name only once `make` has returned; of several processes one makes it and the others wait.
    HostError where the disk refuses; what `make` raises passes through, and nothing stays behind.
    """
    if destination.is_dir():
        return destination
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _locked(destination, on_progress=on_progress):
            if not destination.is_dir():
                _remove_leftovers(destination)
                _fill(destination, make)
    except OSError as error:
        place = error.filename or destination
        raise HostError(f"{place}: {error.strerror}", hint="free some disk, or name another cache folder") from error
    return destination


@contextmanager
def _locked(destination: Path, *, on_progress: Progress) -> Iterator[None]:
    # The kernel drops this lock with its last holder, so a killed process leaves none.
    with (destination.parent / f".{destination.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(f"waiting for another process that is making {destination}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(destination: Path, make: Callable[[Path], None]) -> None:
    # A new name each time: a child of a killed maker may still be writing into the old one.
    partial = Path(tempfile.mkdtemp(prefix=_partial_prefix(destination), dir=destination.parent))
    try:
        make(partial)
        partial.chmod(0o755)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove_leftovers(destination: Path) -> None:
    for leftover in destination.parent.glob(f"{_partial_prefix(destination)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _partial_prefix(destination: Path) -> str:
    return f".{destination.name}.partial-"
