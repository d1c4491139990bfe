"""Everything that is measured on a GPU, one part after the other, each with a time limit of its own.

    python -m bench.gpu.run_all --out DIR [--parts probe,tests,...] [--budget-s 560] [--root ROOT.tar.xz] [--fake]

A part that fails or hangs does not stop the others, and what it had measured by then stays. DIR gets results.jsonl,
log.txt and summary.txt; the summary is printed last. The exit status is the number of parts that did not end well.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.gpu.device import FAKE, REPOSITORY, environment

PR_SET_CHILD_SUBREAPER = 36
INTERRUPT_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Part:
    """One program: its arguments here and on a GPU in host memory, how long it may take, how long it should."""

    name: str
    argv: tuple[str, ...]
    fake_argv: tuple[str, ...]
    limit_s: float
    expected_s: float
    wants_root: bool = False


def _bench(
    name: str, module: str, arguments: str, fake_arguments: str, *times_s: float, wants_root: bool = False
) -> Part:
    argv = (sys.executable, "-m", f"bench.gpu.{module}")
    limit_s, expected_s = times_s
    return Part(name, (*argv, *arguments.split()), (*argv, *fake_arguments.split()), limit_s, expected_s, wants_root)


# Warnings of this machine's packages are not ours to fail for.
_OPTIONS = ("-q", "-W", "default", "-p", "no:cacheprovider", "--tb=short", "--durations=5")
_PYTEST = (sys.executable, "-m", "pytest", *_OPTIONS, "tests/gpu")
# A worker that the driver takes down with it is replaced, and only that test is lost.
_ENGINE = "tests/gpu/test_engine.py"
_SECOND = "tests/gpu/test_second_generation.py"
_ISOLATED = (*_PYTEST, "--ignore", _ENGINE, "--ignore", _SECOND, "-n", "1", "--max-worker-restart", "10")
# Each of these waits for real keepers and loaders of a tiny model: they may as well wait together.
_ENGINE_TESTS = (sys.executable, "-m", "pytest", *_OPTIONS, _ENGINE, "-n", "8")
_SMALL = "--gib 0.05 --tensors 80"

PARTS = (
    _bench("probe", "probe", "", "", 120, 30),
    Part("tests", _ISOLATED, _PYTEST, 300, 40),
    Part("engine", _ENGINE_TESTS, _PYTEST, 200, 80),
    Part("second", (sys.executable, "-m", "pytest", *_OPTIONS, _SECOND), _PYTEST, 150, 60),
    _bench("load", "engine_load", "--gb 16.4", "--gb 0.1", 240, 90),
    _bench("refusals", "refusals", "--gib 8", "--gib 0.02", 150, 50),
    _bench("scrub", "scrub", "--gib 64", "--gib 0.03", 90, 25),
    _bench("attach", "attach", "--gib 120", f"{_SMALL} --engines 2", 270, 120),
    _bench("attach8", "attach", "--gib 120 --slab-gib 8 --engines 2", f"{_SMALL} --engines 1", 200, 70),
    _bench("legacy", "legacy_ipc", "--gib 120", "", 150, 50),
    _bench("cold", "cold_load", "--gb 16.4 --rounds 3 --disk", "--gb 0.1 --rounds 1 --disk", 420, 200),
    _bench("kill", "kill_matrix", "--gib 32", _SMALL, 400, 200, wants_root=True),
    _bench("two", "two_gpus", "--gib 60", _SMALL, 280, 120),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(part.name for part in PARTS))
    parser.add_argument("--budget-s", type=float, default=560)
    parser.add_argument("--root", type=Path, help="a root with systemd, from make_root.sh, for `kill`")
    parser.add_argument("--fake", action="store_true")
    args = parser.parse_args()
    wanted = args.parts.split(",")
    if unknown := set(wanted) - {part.name for part in PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.fake:
        os.environ[FAKE] = "1"
    # What a part leaves behind becomes our child, and is ended before the next one needs the memory.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    deadline = time.monotonic() + args.budget_s
    endings = {}
    with (args.out / "log.txt").open("a") as log:
        for part in sorted((part for part in PARTS if part.name in wanted), key=lambda part: wanted.index(part.name)):
            left_s = deadline - time.monotonic()
            if left_s < part.expected_s / 2:
                endings[part.name] = f"skipped: {left_s:.0f} s left, it takes about {part.expected_s:.0f}"
                continue
            endings[part.name] = _run(part, args, log, limit_s=min(part.limit_s, left_s))
    summary = _summary(args.out / "results.jsonl", endings)
    (args.out / "summary.txt").write_text(summary)
    print(summary, flush=True)
    return sum(ending != "ok" for ending in endings.values())


def _run(part: Part, args: argparse.Namespace, log: TextIO, *, limit_s: float) -> str:
    argv = list(part.fake_argv if args.fake else part.argv)
    if "pytest" not in argv:
        argv += ["--json", str(args.out.absolute() / "results.jsonl"), *(["--fake"] if args.fake else [])]
    if part.wants_root and args.root is not None:
        argv += ["--root", str(args.root)]
    _tell(log, f"===== {part.name}: {' '.join(argv[1:])} (at most {limit_s:.0f} s)")
    started = time.monotonic()
    process = subprocess.Popen(
        argv, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    reader = threading.Thread(target=_copy, args=(process, log), daemon=True)
    reader.start()
    try:
        process.wait(limit_s)
        ending = "ok" if process.returncode == 0 else f"status {process.returncode}"
    except subprocess.TimeoutExpired:
        ending = f"stopped after {limit_s:.0f} s"
        # So that it can tell what it has and end what it started.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_TIMEOUT_S)
    _end_descendants()
    process.wait()
    reader.join(5)
    _tell(log, f"===== {part.name}: {ending}, {time.monotonic() - started:.0f} s")
    return ending


def _copy(process: "subprocess.Popen[str]", log: TextIO) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        _tell(log, line.rstrip("\n"))


def _end_descendants() -> None:
    """Kill what the last part left running; orphans come to us one generation after the other."""
    for _ in range(50):
        children = [
            int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
        ]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _tell(log: TextIO, line: str) -> None:
    print(line, flush=True)
    print(line, file=log, flush=True)


def _summary(path: Path, endings: dict[str, str]) -> str:
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    failed = [result for result in results if result["kind"] == "check" and not result["ok"]]
    lines = ["", "===== summary"]
    lines += [f"{name:<10} {ending}" for name, ending in endings.items()]
    lines += ["", f"{sum(result['kind'] == 'check' for result in results)} checks, {len(failed)} failed"]
    lines += [f"  FAILED {result['bench']}: {result['name']}: {result['detail'][:300]}" for result in failed]
    lines += ["", *_ratios(results), "", "figures:"]
    lines += [
        f"  {result['bench']:<20} {result['name']:<58} {result['value']:12.3f} {result['unit']}"
        for result in results
        if result["kind"] == "figure"
    ]
    return "\n".join(lines) + "\n"


def _ratios(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return how the ways to get weights compare, for each GiB, as far as they were measured."""
    found = {(result["bench"], result["name"]): result for result in results if result["kind"] == "figure"}
    attach, legacy = found.get(("attach", "fresh process: total")), found.get(("legacy_ipc", "fresh process: total"))
    disk = found.get(("cold_load", "safetensors"))
    lines = []
    if attach and legacy:
        lines.append(
            f"legacy CUDA IPC takes {legacy['value'] / attach['value']:.2f} times as long as attach, same weights"
        )
    if attach and disk:
        # 120 GiB by attach, against as many at the rate that was measured on fewer.
        seconds = 120 * 2**30 / 1e9 / disk["value"]
        lines.append(
            f"safetensors from the page cache takes {1e3 * seconds / attach['value']:.0f} times as long, for each GiB"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
