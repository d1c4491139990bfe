"""What this machine is, and what its driver does where the documentation leaves it open. Nothing here is a test.

python -m bench.gpu.probe [--json FILE] [--fake]
"""

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from appliance import gpus, inventory
from appliance.descriptors import Descriptor
from appliance.errors import ApplianceError
from appliance.slabs.cuda import CudaBackend
from appliance.slabs.cuda_driver import CudaError
from bench.gpu.device import GIB, REPOSITORY, environment, prepared, visible
from bench.gpu.report import Report, parser

PACKAGES = (
    "torch",
    "cuda-bindings",
    "nvidia-ml-py",
    "safetensors",
    "fastsafetensors",
    "transformers",
    "pydantic",
    "blake3",
)

# Each runs in a process of its own: what it does may end the context.
FAULTS = {
    "a copy into a mapping before any access is allowed": "gpu.map(address, size, handle); copy_in(address)",
    "a copy into a read-only mapping": (
        "gpu.map(address, size, handle); gpu.allow(address, size, writable=False); copy_in(address)"
    ),
}
FAULT = """
import ctypes, sys
from appliance.slabs.cuda_driver import open_device
from bench.gpu.device import prepared
def copy_in(address):
    data = ctypes.create_string_buffer(16)
    gpu._call("cuMemcpyHtoD", address, ctypes.addressof(data), 16)
with prepared():
    gpu = open_device(sys.argv[1])
    size = gpu.granularity_bytes
    handle, address = gpu.create(size), gpu.reserve(size)
    {act}
    print("allowed")
"""


def main() -> int:
    arguments = parser(__doc__)
    args = arguments.parse_args()
    report = Report("probe", args.json)
    _machine(report)
    uuid = visible(fake=args.fake)[0]
    started = time.perf_counter()
    with prepared(fake=args.fake):
        report.figure("CUDA context", 1e3 * (time.perf_counter() - started), "ms")
        backend = CudaBackend(uuid)
        for probe in (_descriptor, _same_process, _part_of_a_slab, _few_descriptors, _sizes):
            try:
                probe(report, backend)
            except (ApplianceError, CudaError, OSError, ValueError) as error:
                report.note(f"{probe.__name__.strip('_')}: {type(error).__name__}: {error}")
    for name, act in FAULTS.items():
        done = subprocess.run(
            [sys.executable, "-c", FAULT.format(act=act), uuid],
            check=False,
            cwd=REPOSITORY,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        said = (done.stdout + done.stderr).strip().splitlines()
        report.note(f"{name}: {said[-1][:200] if said else ''} (status {done.returncode})")
    return 0


def _machine(report: Report) -> None:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    report.note(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, {found}")
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    report.note(f"memory: total {memory['MemTotal'].strip()}, available {memory['MemAvailable'].strip()}")
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "flags")):
            name, _, value = line.partition(":")
            has = [flag for flag in ("sha_ni", "avx512f", "vaes") if flag in value.split()]
            report.note(value.strip() if name.startswith("model") else f"instructions: {has}")
            if name.startswith("flags"):
                break
    for gpu in inventory.gpus():
        report.note(f"/proc/driver: {gpu}")
    for state in gpus.gpu_states():
        report.note(f"NVML: {state}")
    report.note(f"cgroup: {Path('/proc/self/cgroup').read_text().strip()!r}; torch {torch.version.cuda}")


def _descriptor(report: Report, backend: CudaBackend) -> None:
    with backend.create("probe", backend.granularity_bytes) as slab, slab.seal() as descriptor:
        stat = os.fstat(descriptor.fileno())
        target = Path(f"/proc/self/fd/{descriptor.fileno()}").readlink()
        report.note(
            f"a slab's descriptor is {target}, mode {stat.st_mode:o}, device {stat.st_rdev:#x}, inode {stat.st_ino}"
        )


def _same_process(report: Report, backend: CudaBackend) -> None:
    """A donor maps what it exported itself."""
    size_bytes = backend.granularity_bytes
    with (
        backend.create("probe", size_bytes) as slab,
        slab.seal() as descriptor,
        backend.map(descriptor, size_bytes),
        backend.map(descriptor, size_bytes),
    ):
        report.note("a descriptor of this very process can be mapped, twice at a time")


def _part_of_a_slab(report: Report, backend: CudaBackend) -> None:
    size_bytes = 4 * backend.granularity_bytes
    with backend.create("probe", size_bytes) as slab, slab.seal() as descriptor:
        backend.map(descriptor, size_bytes // 2).close()
        report.note("the first half of a slab can be mapped")


def _few_descriptors(report: Report, backend: CudaBackend) -> None:
    """What the driver says when it can open no more."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limit[1]))
    held: list[Descriptor] = []
    try:
        while len(held) < 64:
            with backend.create("probe", backend.granularity_bytes) as slab:
                held.append(slab.seal())
        report.note("64 slabs beyond the limit of descriptors: the driver does not mind")
    except ApplianceError as error:
        report.note(f"no descriptors left: {type(error).__name__}: {error.message}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for descriptor in held:
            descriptor.close()


def _sizes(report: Report, backend: CudaBackend) -> None:
    """How long making and mapping take, by the size of a slab, for 32 GiB in all."""
    total = min(32 * GIB, backend.gpu.memory()[0] // 2)
    for size_bytes in (1 * GIB, 2 * GIB, 4 * GIB, 8 * GIB):
        count = total // size_bytes
        if count == 0:
            continue
        started = time.perf_counter()
        descriptors = []
        for _ in range(count):
            with backend.create("probe", size_bytes) as slab:
                descriptors.append(slab.seal())
        made = time.perf_counter()
        mappings = [backend.map(descriptor, size_bytes) for descriptor in descriptors]
        mapped = time.perf_counter()
        for mapping in mappings:
            mapping.close()
        unmapped = time.perf_counter()
        for descriptor in descriptors:
            descriptor.close()
        freed = time.perf_counter()
        report.figure(
            f"map {count} slabs of {size_bytes // GIB} GiB",
            1e3 * (mapped - made),
            "ms",
            make_ms_each=1e3 * (made - started) / count,
            map_ms_each=1e3 * (mapped - made) / count,
            unmap_ms_each=1e3 * (unmapped - mapped) / count,
            free_ms_each=1e3 * (freed - unmapped) / count,
        )


if __name__ == "__main__":
    raise SystemExit(main())
