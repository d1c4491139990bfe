"""A checkpoint from the page cache to the GPU: ours, verified, beside loaders that verify nothing.

    python -m bench.gpu.cold_load [--folder DIR] [--gb 16.4] [--rounds 3] [--disk] [--json FILE] [--fake]

Each load is a fresh process with its CUDA context open; the loaders take turns. Times are from the first byte of the
checkpoint looked at until every tensor is on the GPU. With --disk each loads once more with nothing in the page cache.
"""

import argparse
import ctypes
import hashlib
import importlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.device import REPOSITORY, environment, is_fake, visible
from bench.gpu.report import Report, parser

LOADERS = ("ours sha256", "ours blake3", "safetensors", "fastsafetensors")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, help="where the checkpoint is, or is to be made")
    arguments.add_argument("--gb", type=float, default=16.4)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--disk", action="store_true", help="also without the page cache (root)")
    arguments.add_argument("--one", choices=LOADERS, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.one:
        print(json.dumps(_load(args.one, args.folder, fake=args.fake)))
        return 0
    report = Report("cold_load", args.json)
    visible(fake=args.fake)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = args.folder or Path(temporary) / "checkpoint"
        if not (folder / "config.json").exists():
            _python(["-m", "bench.gpu.make_checkpoint", str(folder), "--gb", str(args.gb)], timeout_s=300)
        size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        report.note(f"{size_bytes / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} files")
        _warm(folder)
        report.figure("in the page cache before", 100 * _cached(folder), "%")
        _ceilings(report, folder)
        _rounds(report, folder, args.rounds, size_bytes)
        report.figure("in the page cache after", 100 * _cached(folder), "%")
        if args.disk:
            _disk(report, folder, size_bytes)
    return int(report.failures > 0)


def _rounds(report: Report, folder: Path, rounds: int, size_bytes: int) -> None:
    times: dict[str, list[float]] = {}
    sums: dict[str, object] = {}
    for _ in range(rounds):
        for loader in LOADERS:
            result = _child(report, loader, folder)
            if result is not None:
                times.setdefault(loader, []).append(float(result["seconds"]))
                sums[loader] = result["sum"]
    for loader, seconds in times.items():
        median = statistics.median(seconds)
        report.figure(loader, size_bytes / median / 1e9, "GB/s", seconds=median, least=min(seconds), most=max(seconds))
    report.check("all loaders give the same bytes", len({str(value) for value in sums.values()}) == 1, f"{sums}")
    if "ours sha256" in times and "safetensors" in times:
        ratio = statistics.median(times["safetensors"]) / statistics.median(times["ours sha256"])
        # The fake GPU's memory is host memory, and safetensors only maps the files there.
        report.check(
            "verified is at least as fast as unverified safetensors",
            ratio >= 1 or is_fake(),
            f"{ratio:.2f} times as fast",
        )


def _disk(report: Report, folder: Path, size_bytes: int) -> None:
    for loader in ("ours sha256", "ours blake3", "safetensors", "fastsafetensors"):
        try:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("1\n")
        except OSError as error:
            report.note(f"the page cache cannot be dropped: {error}")
            return
        cached = 100 * _cached(folder)
        if (result := _child(report, loader, folder)) is not None:
            seconds = float(result["seconds"])
            report.figure(f"from disk: {loader}", size_bytes / seconds / 1e9, "GB/s", seconds=seconds, cached=cached)


def _ceilings(report: Report, folder: Path) -> None:
    """Tell what one core does, and what hashing alone does with all of them."""
    from appliance.checkpoint.digests import digest_checkpoint

    data = mmap.mmap(-1, 256 << 20)
    data[:] = os.urandom(1 << 20) * 256
    hashers: dict[str, Callable[[], object]] = {"sha256, one core": lambda: hashlib.sha256(data).digest()}
    try:
        from blake3 import blake3

        hashers["blake3, one core"] = lambda: blake3(data).digest()
        hashers["blake3, all cores"] = lambda: blake3(data, max_threads=blake3.AUTO).digest()
    except ImportError as error:
        report.note(f"no blake3: {error}")
    for name, take in hashers.items():
        started = time.perf_counter()
        take()
        report.figure(name, len(data) / (time.perf_counter() - started) / 1e9, "GB/s", cores=os.cpu_count())
    for algorithm in ("sha256", "blake3"):
        started = time.perf_counter()
        try:
            manifest = digest_checkpoint(folder, algorithm=algorithm)
        except ImportError:
            continue
        seconds = time.perf_counter() - started
        size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        report.figure(f"digest of the checkpoint, {algorithm}", size_bytes / seconds / 1e9, "GB/s", seconds=seconds)
        (folder.parent / f"{folder.name}.{algorithm}.json").write_text(json.dumps(dict(manifest.digests)))


def _child(report: Report, loader: str, folder: Path) -> dict[str, Any] | None:
    argv = ["-m", "bench.gpu.cold_load", "--one", loader, "--folder", str(folder)]
    done = _python(argv, timeout_s=120)
    if done.returncode:
        last = done.stderr.strip().splitlines()
        report.note(f"{loader}: not measured: {last[-1] if last else done.returncode}"[:300])
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _python(argv: list[str], *, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *argv],
        check=False,
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def _load(loader: str, folder: Path, *, fake: bool) -> dict[str, Any]:
    """Load with one of them in this process; return the time and a sum over all bytes."""
    import torch

    from bench.gpu.device import prepared, synchronize, torch_device

    with prepared(fake=fake):
        device = torch_device(0)
        load = _prepared_loader(loader, folder, device)
        synchronize()
        started = time.perf_counter()
        tensors = load()
        synchronize()
        seconds = time.perf_counter() - started
        # Order does not matter, names and bytes do.
        total = 0
        for name, tensor in tensors.items():
            value = int(tensor.reshape(-1).view(torch.int16).to(torch.int64).sum())
            total = (total + value * (1 + int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))) % 2**64
    return {"seconds": seconds, "sum": total, "tensors": len(tensors)}


def _prepared_loader(loader: str, folder: Path, device: Any) -> Callable[[], dict[str, Any]]:
    """Return what loads, everything it needs imported: imports are no part of the time."""
    import torch

    files = [str(file) for file in sorted(folder.glob("*.safetensors"))]
    if loader == "safetensors":
        from safetensors.torch import load_file

        return lambda: {name: t for file in files for name, t in load_file(file, device=str(device)).items()}
    if loader == "fastsafetensors":
        fast_open = importlib.import_module("fastsafetensors").fastsafe_open

        def fast() -> dict[str, Any]:
            with fast_open(files, device=str(device), nogds=True) as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

        return fast
    from appliance.checkpoint.manifest import CheckpointManifest, FileDigest
    from appliance.checkpoint.safetensors import TensorInfo
    from appliance.tensors.staging import read_to_device

    algorithm = loader.split()[1]
    digests = json.loads((folder.parent / f"{folder.name}.{algorithm}.json").read_text())
    manifest = CheckpointManifest("bench", algorithm, tuple(FileDigest(*item) for item in digests.items()))  # type: ignore[arg-type]

    def ours() -> dict[str, Any]:
        tensors: dict[str, Any] = {}

        def allocate(info: TensorInfo) -> torch.Tensor:
            tensor = tensors[info.name] = torch.empty(info.shape, dtype=torch.bfloat16, device=device)
            return tensor

        read_to_device(folder, manifest, device=device, allocate=allocate)
        return tensors

    return ours


def _warm(folder: Path) -> None:
    buffer = bytearray(16 << 20)
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def _cached(folder: Path) -> float:
    """Return the share of the tensor files' pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = resident = 0
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
            pages = -(-len(mapped) // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * pages)()
            anchor = ctypes.c_char.from_buffer(mapped)
            libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapped)), found)
            del anchor
            total += pages
            resident += sum(page & 1 for page in bytes(found))
    return resident / max(total, 1)


if __name__ == "__main__":
    raise SystemExit(main())
