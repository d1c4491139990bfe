"""What a restart pays for knowing its checkpoint where each open of a file takes long: ours against vLLM's own.

    python -m bench.vllm.opens [--json] [--files 66] [--delay 0.1] [--rounds 3]

Needs vLLM 0.31 or later, and strace, which delays every open of a file of the checkpoint as a slow file system does.
The two take turns, each in a process of its own, and imports are not counted. `ours` verifies the signature and
compares every file with what it was when its bytes were hashed; `theirs` is `hash_checkpoint` of vLLM's weight cache,
which hashes each file's header. Neither reads tensors: where only values changed, `theirs` says the same as before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from appliance.checkpoint.identity import check_stats
from appliance.checkpoint.stat_record import FileStat
from appliance.checkpoint.verification import verified_stats
from tests.sites import Site

OURS, THEIRS = "ours", "theirs"


@dataclass(frozen=True)
class Figure:
    """Median seconds of one check, how many opens strace delayed, and whether it sees that a tensor was zeroed."""

    which: str
    files: int
    delay_s: float
    median_s: float
    opens: int
    sees_changed_values: bool


def main() -> None:
    """Make the checkpoint, let the two take turns, show the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--files", type=int, default=66)
    parser.add_argument("--delay", type=float, default=0.1, help="seconds that each open takes longer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(_child(given.child[0], Path(given.child[1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "site", _checkpoint(Path(folder) / "made", given.files))
        _record(site)
        times: dict[str, list[float]] = {OURS: [], THEIRS: []}
        opens, before = {}, {}
        for _ in range(given.rounds):
            for which, found in times.items():
                seconds, opens[which], before[which] = _delayed(which, site, given.delay)
                found.append(seconds)
        site.zero("tensor-0")
        sees = {which: _delayed(which, site, 0)[2] != before[which] for which in times}
    figures = [
        Figure(which, given.files, given.delay, statistics.median(found), opens[which], sees[which])
        for which, found in times.items()
    ]
    if given.json:
        print(json.dumps([asdict(figure) for figure in figures]))
        return
    for figure in figures:
        sight = "sees" if figure.sees_changed_values else "does not see"
        print(f"{figure.which:6} {figure.median_s:7.3f} s  {figure.opens:3} opens  {sight} changed values")


def _checkpoint(folder: Path, files: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in range(files):
        tensors = {f"tensor-{number}": torch.full((1024, 128), float(number + 1), dtype=torch.bfloat16)}
        save_file(tensors, folder / f"model-{number + 1:05}-of-{files:05}.safetensors")
    return folder


def _record(site: Site) -> None:
    """Keep what the loader would put into the shard's record."""
    stats = verified_stats(site.target().identity, site.folder / "state")
    (site.folder / "record.json").write_text(json.dumps({path: stat.to_json() for path, stat in stats.items()}))


def _delayed(which: str, site: Site, delay_s: float) -> tuple[float, int, str]:
    """Return the seconds that a check took in a traced process, the opens of the checkpoint, and what it found."""
    trace = site.folder / "trace"
    paths = [path for path in site.checkpoint.iterdir() if path.is_file()]
    argv = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(trace), "-e", "trace=open,openat,openat2"]
    if delay_s:
        argv += ["-e", f"inject=open,openat,openat2:delay_enter={int(delay_s * 1e6)}"]
    for path in paths:
        # By its name, too: that is what is opened relative to the folder.
        argv += ["-P", str(path), "-P", path.name]
    argv += [sys.executable, "-m", __spec__.name, "--child", which, str(site.folder)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    seconds, found = json.loads(done.stdout.splitlines()[-1])
    return seconds, trace.read_text().count("open"), found


def _child(which: str, folder: Path) -> tuple[float, str]:
    return _ours(folder) if which == OURS else _theirs(folder / "checkpoint")


def _ours(folder: Path) -> tuple[float, str]:
    from appliance.target import read_target

    recorded = {
        path: FileStat.from_json(stat) for path, stat in json.loads((folder / "record.json").read_text()).items()
    }
    began = time.perf_counter()
    target = read_target(folder / "appliance.yaml", "m")
    changed = check_stats(target.identity, recorded)
    return time.perf_counter() - began, f"{target.identity.root_digest} {changed}"


def _theirs(checkpoint: Path) -> tuple[float, str]:
    from vllm.model_executor.model_loader.weight_cache.protocol import hash_checkpoint

    began = time.perf_counter()
    found = hash_checkpoint(str(checkpoint))
    return time.perf_counter() - began, str(found)


if __name__ == "__main__":
    main()
