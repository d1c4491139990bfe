"""Hashing a checkpoint: this package against OpenSSF's model_signing, the same files in the same run.

    python bench/hashing.py [--json] [--mib 1024] [--rounds 7] [--folder DIR]

The files are in the page cache, where hashing bounds the time. The two take turns, and who goes first alternates. A
ratio above 1 says that this package is faster: the median of the rounds' own ratios, so that a busy moment of the
machine weighs on one round only. The ratio of processor time does not depend on what else the machine does. Both must
come to the same digests. `read` is the loader's way: every tensor read into its memory and hashed there.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.manifest import ALGORITHMS, Algorithm
from appliance.checkpoint.reader import read_verified
from appliance.checkpoint.safetensors import TensorInfo
from appliance.checkpoint.streams import usable_cpus

# Sizes of the files in parts of the whole: one large file, a few equal ones, one large among small ones, many.
SHAPES = {
    "1 file": [1],
    "3 equal files": [1] * 3,
    "8 equal files": [1] * 8,
    "1 large, 4 small": [4, 1, 1, 1, 1],
    "66 equal files": [1] * 66,
}

_Times = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """Median GB/s (10**9 bytes) of each, and how many times less time, and processor time, the first takes."""

    files: str
    algorithm: Algorithm
    ours_gb_s: float
    theirs_gb_s: float
    ratio: float
    cpu_ratio: float
    read_gb_s: float


def main() -> None:
    """Make the files, let the two take turns, show the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=1024, help="size of each checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write the files (default: a temporary directory)")
    arguments = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name, parts in SHAPES.items():
            checkpoint = _make(Path(folder) / name.replace(" ", "-"), parts, arguments.mib << 20)
            for algorithm in ALGORITHMS:
                figure = _measure(name, checkpoint, algorithm, arguments.rounds)
                figures.append(figure)
                if not arguments.json:
                    _show(figure)
    if arguments.json:
        print(json.dumps({"cpus": usable_cpus(), "figures": [asdict(figure) for figure in figures]}))


def _make(folder: Path, parts: list[int], size_bytes: int) -> Path:
    """Write safetensors files of one tensor each, so that they can be read as well as hashed."""
    folder.mkdir()
    block = bytes(range(251)) * 4178  # about a MiB
    for number, part in enumerate(parts):
        data_bytes = size_bytes * part // sum(parts)
        tensor = {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]}
        header = json.dumps({f"t{number}": tensor}).encode()
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            left = data_bytes
            while left:
                left -= file.write(block[:left])
    return folder


def _measure(name: str, checkpoint: Path, algorithm: Algorithm, rounds: int) -> Figure:
    theirs = _their_digests(checkpoint, algorithm)
    manifest = digest_checkpoint(checkpoint, algorithm=algorithm)
    if dict(manifest.digests) != theirs():
        raise SystemExit(f"{name}: the digests differ")
    size_bytes = sum(file.stat().st_size for file in checkpoint.iterdir())
    memory = {f"t{number}": bytearray(file.stat().st_size) for number, file in enumerate(sorted(checkpoint.iterdir()))}

    def ours() -> object:
        return digest_checkpoint(checkpoint, algorithm=algorithm)

    def allocate(tensor: TensorInfo) -> memoryview:
        return memoryview(memory[tensor.name])[: tensor.size_bytes]

    def read() -> object:
        return read_verified(checkpoint, manifest, allocate=allocate)

    ours_s: list[_Times] = []
    theirs_s: list[_Times] = []
    read_s: list[_Times] = []
    for number in range(rounds):
        turns: list[tuple[list[_Times], Callable[[], object]]] = [(ours_s, ours), (theirs_s, theirs)]
        for times, run in turns if number % 2 else reversed(turns):
            times.append(_time(run))
        read_s.append(_time(read))
    gigabytes = size_bytes / 1e9
    return Figure(
        files=name,
        algorithm=algorithm,
        ours_gb_s=gigabytes / statistics.median(wall_s for wall_s, _ in ours_s),
        theirs_gb_s=gigabytes / statistics.median(wall_s for wall_s, _ in theirs_s),
        ratio=statistics.median(their[0] / our[0] for their, our in zip(theirs_s, ours_s, strict=True)),
        cpu_ratio=statistics.median(their[1] / our[1] for their, our in zip(theirs_s, ours_s, strict=True)),
        read_gb_s=gigabytes / statistics.median(wall_s for wall_s, _ in read_s),
    )


def _their_digests(checkpoint: Path, algorithm: Algorithm) -> Callable[[], dict[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import model_signing

    config: Any = model_signing.hashing.Config().use_file_serialization(hashing_algorithm=algorithm)
    return lambda: {item.identifier: item.digest.digest_hex for item in config.hash(checkpoint).resource_descriptors()}


def _time(run: Callable[[], object]) -> _Times:
    """Return seconds on the wall, and of processor time in all threads."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def _show(figure: Figure) -> None:
    print(
        f"{figure.files:18} {figure.algorithm:7} {figure.ours_gb_s:6.2f} GB/s, model_signing {figure.theirs_gb_s:6.2f} "
        f"(x{figure.ratio:.2f}, processor time x{figure.cpu_ratio:.2f}), read into memory {figure.read_gb_s:6.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
