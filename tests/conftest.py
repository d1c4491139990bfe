"""What every test gets: a look at what it leaves behind, a stop where its tier cannot run, and the real model."""

import gc
import multiprocessing.resource_tracker
import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.demo.cache import default_cache
from appliance.demo.model import obtain
from appliance.errors import HostError
from tests.tiers import LACKING, cannot_run

# Libraries open and start these once, for the life of the process.
KEPT_FILES = ("/dev/urandom",)
KEPT_THREADS = ("tqdm_monitor", "pytest_timeout")
THREAD_END_TIMEOUT_S = 2.0


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Generator[None]:
    """Fail the test if it leaves a descriptor, a thread or a child process behind.

    What a test leaves on purpose is marked: `@pytest.mark.leaks("why")`.
    """
    marker = request.node.get_closest_marker("leaks")
    if marker is not None:
        if not (marker.args and str(marker.args[0]).strip()):
            pytest.fail("the marker `leaks` wants a reason", pytrace=False)
        yield
        return
    descriptors, threads, children = _descriptors(), set(threading.enumerate()), _children()
    yield
    left = [f"thread {thread.name}" for thread in _still_running(set(threading.enumerate()) - threads)]
    left += [f"process {pid} ({_command(pid)})" for pid in _children() - children]
    left += [f"descriptor {fd} ({target})" for fd, target in _descriptors() - descriptors if not _is_kept(target)]
    if left:
        pytest.fail(f"the test left behind: {', '.join(sorted(left))}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_of_earlier_modules() -> None:
    """What lies in cycles would be closed in the middle of some later test, and keeps memory mapped until then."""
    gc.unfreeze()
    gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several processes its share of the processors, before any library counts them."""
    if (worker := getattr(config, "workerinput", None)) is not None:
        share = len(os.sched_getaffinity(0)) // worker["workercount"]
        os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.schedule import place

        items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from tests.schedule import Schedule

    return Schedule(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stop a test whose tier cannot run here, before its fixtures are made."""
    for tier, lacking in LACKING.items():
        if item.get_closest_marker(tier) and (reason := lacking()):
            cannot_run(f"{tier}: {reason}")


@pytest.fixture(scope="session")
def model_checkpoint() -> Iterator[Path]:
    """SmolLM2-135M-Instruct as safetensors, shared by all tests and runs: copy it to change it."""
    try:
        checkpoint = obtain(default_cache(), on_progress=lambda line: None)
    except HostError as error:
        cannot_run(f"model: {error}")
    before = _stats(checkpoint)
    yield checkpoint
    assert _stats(checkpoint) == before, f"a test changed the shared checkpoint: delete {checkpoint}"


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add((entry.name, str(entry.readlink())))
        except FileNotFoundError:  # the descriptor that listed the directory
            continue
    return found


def _is_kept(target: str) -> bool:
    return target in KEPT_FILES or target in _resource_tracker_pipes()


def _resource_tracker_pipes() -> set[str]:
    # multiprocessing starts one process and keeps a pipe to it until the interpreter ends.
    fd = getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None)
    return set() if fd is None else {str(Path(f"/proc/self/fd/{fd}").readlink())}


def _children() -> set[int]:
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            continue
    return pids - {tracker}


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return command or f"{Path(f'/proc/{pid}/comm').read_text().strip()}, not waited for"
    except OSError:
        return "gone meanwhile"


def _still_running(threads: set[threading.Thread]) -> list[threading.Thread]:
    for thread in threads:
        if thread.name not in KEPT_THREADS:
            thread.join(THREAD_END_TIMEOUT_S)
    return [thread for thread in threads if thread.is_alive() and thread.name not in KEPT_THREADS]


def _stats(directory: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in directory.iterdir()}
