"""How fast resident weights are summed, against how fast the GPU reads its memory in the same run.

python -m bench.gpu.scrub [--gib 64] [--repeat 5] [--json FILE] [--fake]
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from appliance.slabs.devices import backend
from appliance.slabs.interface import Mapping
from appliance.tensors import checksum as module
from appliance.tensors.checksum import checksum, checksums
from appliance.tensors.storage import over
from bench.gpu.device import GIB, is_fake, prepared, synchronize, torch_device
from bench.gpu.report import Report, parser


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--gib", type=float, default=64)
    arguments.add_argument("--repeat", type=int, default=5)
    args = arguments.parse_args()
    report = Report("scrub", args.json)
    with prepared(fake=args.fake) as uuids:
        _measure(report, uuids[0], int(args.gib * GIB), args.repeat)
    return int(report.failures > 0)


def _measure(report: Report, uuid: str, size_bytes: int, repeat: int) -> None:
    gpu = backend(uuid)
    slab_bytes = min(gpu.default_slab_bytes, size_bytes) // gpu.granularity_bytes * gpu.granularity_bytes
    mappings = [_random_slab(uuid, slab_bytes, seed) for seed in range(size_bytes // slab_bytes)]
    _speed(report, mappings, repeat)
    _agreement(report, uuid, mappings)
    for mapping in mappings:
        mapping.close()
    _flip(report, uuid, slab_bytes)


def _speed(report: Report, mappings: Sequence[Mapping], repeat: int) -> None:
    windows = over([mapping.window(0, mapping.size_bytes) for mapping in mappings], torch_device(0))
    lanes = [window.view(torch.int64) for window in windows]
    copy = torch.empty_like(windows[0])
    part = windows[0][: 256 << 20]
    total_bytes = sum(window.numel() for window in windows)

    def rate(name: str, act: Callable[[], object], moved_bytes: int, **facts: object) -> float:
        seconds = statistics.median(_seconds(act) for _ in range(repeat))
        report.figure(name, moved_bytes / seconds / 1e9, "GB/s", seconds=seconds, **facts)
        return moved_bytes / seconds / 1e9

    first = _seconds(lambda: checksums(mappings[:1]))
    report.figure("the first checksum, its kernel compiled and loaded", 1e3 * first, "ms")
    scrub = rate("scrub", lambda: checksums(mappings), total_bytes, gib=total_bytes / GIB)
    reading = rate("plain read (torch.sum over int64)", lambda: [lane.sum() for lane in lanes], total_bytes)
    report.figure("scrub against plain read", scrub / reading, "times")
    rate("plain copy, bytes read and written", lambda: copy.copy_(windows[0]), 2 * windows[0].numel())
    rate("the same sum from torch's operations", lambda: checksum(part), part.numel())


def _agreement(report: Report, uuid: str, mappings: Sequence[Mapping]) -> None:
    values = checksums(mappings)
    report.check("the sum is the same every time", values == checksums(mappings))
    report.check("slabs with different bytes have different sums", len(set(values)) == len(values))
    part = over([mappings[0].window(0, min(256 << 20, mappings[0].size_bytes))], torch_device(0))[0]
    take = checksum if is_fake() else module.gpu_checksum(uuid)
    found = {int(take(part)), int(checksum(part)), int(checksum(part.cpu()))}
    report.check("kernel, torch on the GPU and torch on the CPU agree", len(found) == 1, f"{found}")


def _flip(report: Report, uuid: str, slab_bytes: int) -> None:
    """Change single bits of a slab that is still written, and see each in its sum."""
    take = checksum if is_fake() else module.gpu_checksum(uuid)
    with backend(uuid).create("flip", slab_bytes) as slab:
        memory = over([slab.window(0, slab_bytes)], torch_device(0))[0]
        memory.view(torch.int64).random_()
        before = int(take(memory))
        missed = []
        for place in (0, 7, slab_bytes // 2 + 3, slab_bytes - 1):
            for bit in (1, 128):
                memory[place] ^= bit
                missed += [(place, bit)] if int(take(memory)) == before else []
                memory[place] ^= bit
        report.check("every flipped bit shows", not missed, f"{missed}")
        report.check("and the sum is back when the bit is", int(take(memory)) == before)
        del memory


def _random_slab(uuid: str, size_bytes: int, seed: int) -> Mapping:
    gpu, device = backend(uuid), torch_device(0)
    with gpu.create(f"scrub-{seed}", size_bytes) as slab:
        memory = over([slab.window(0, size_bytes)], device)[0]
        memory.view(torch.int64).random_(generator=torch.Generator(device).manual_seed(seed))
        del memory
        with slab.seal() as descriptor:
            return gpu.map(descriptor, size_bytes)


def _seconds(act: Callable[[], object]) -> float:
    synchronize()
    started = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
