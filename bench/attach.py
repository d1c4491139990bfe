"""Attach time: from a shard's descriptors in hand to every tensor of a skeleton assigned.

    python bench/attach.py [--json] [--gib 4] [--tensors 2000] [--repeat 7]

Each figure is the median of the repetitions in one process, imports and the skeleton apart: both are the same for a
start from disk. Varied are the bytes at one number of tensors, and the number of tensors at one number of bytes.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import nn

from appliance import layout as layouts
from appliance import memfd
from appliance.descriptors import Descriptor
from appliance.slabs.devices import backend
from appliance.slabs.interface import Backend
from appliance.tensors.attachment import attach
from appliance.tensors.packing import Packed, pack

_PARTS = ("q", "k", "v", "o", "gate", "up", "down", "norm")


@dataclass(frozen=True)
class Figure:
    """Median times of one shard, in milliseconds."""

    gib: float
    tensors: int
    slabs: int
    read_layout_ms: float
    map_ms: float
    assign_ms: float
    total_ms: float
    skeleton_ms: float
    pack_ms: float


class Block(nn.Module):
    """A layer as engines have it: eight submodules with a weight each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for part in _PARTS:
            self.add_module(part, nn.Linear(width, 64, bias=False, dtype=torch.bfloat16))


class Model(nn.Module):
    """Layers of eight weights of one size; a checkpoint's own sizes make no difference to attaching."""

    def __init__(self, tensors: int, size_bytes: int) -> None:
        super().__init__()
        width = size_bytes // tensors // 64 // 2
        self.layers = nn.ModuleList([Block(width) for _ in range(tensors // len(_PARTS))])


def measure(tensors: int, gib: float, repeat: int) -> Figure:
    """Return the figure of a shard with so many tensors and bytes."""
    size_bytes = int(gib * 2**30)
    device = backend("cpu")
    with torch.device("meta"):
        model = Model(tensors, size_bytes)
    model.to_empty(device="cpu")
    start_s = time.perf_counter()
    packed = pack(model, device)
    pack_ms = (time.perf_counter() - start_s) * 1000
    stored = memfd.sealed("layout", [packed.layout.encode()])
    runs = [_attached(tensors, size_bytes, stored, packed, device) for _ in range(repeat)]
    read_ms, map_ms, assign_ms, skeleton_ms = (statistics.median(times) * 1000 for times in zip(*runs, strict=True))
    total_ms = statistics.median(sum(times[:3]) for times in runs) * 1000
    figure = Figure(gib, tensors, len(packed.slabs), read_ms, map_ms, assign_ms, total_ms, skeleton_ms, pack_ms)
    packed.close()
    stored.close()
    return figure


def _attached(
    tensors: int, size_bytes: int, stored: Descriptor, packed: Packed, device: Backend
) -> tuple[float, float, float, float]:
    begin_s = time.perf_counter()
    with torch.device("meta"):
        skeleton = Model(tensors, size_bytes)
    start_s = time.perf_counter()
    layout = layouts.decode(memfd.read(stored, what="layout", limit_bytes=layouts.LIMIT_BYTES))
    read_s = time.perf_counter()
    mappings = [device.map(slab, size) for slab, size in zip(packed.slabs, layout.slab_sizes, strict=True)]
    map_s = time.perf_counter()
    attach(skeleton, layout, mappings)
    end_s = time.perf_counter()
    for mapping in mappings:
        mapping.close()
    return read_s - start_s, map_s - read_s, end_s - map_s, start_s - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Attach time over bytes and over tensors, on the CPU.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    shapes = [(args.tensors, args.gib)]
    shapes += [(args.tensors, args.gib / part) for part in (2, 4, 16)]
    shapes += [(args.tensors // part, args.gib / 4) for part in (2, 4)]
    figures = [measure(tensors, gib, args.repeat) for tensors, gib in shapes]
    if args.json:
        print(json.dumps({"attach": [asdict(figure) for figure in figures]}))
        return
    print("  GiB tensors slabs   layout     map  assign    total  (skeleton     pack)  ms")
    for figure in figures:
        print(
            f"{figure.gib:5.2f} {figure.tensors:7d} {figure.slabs:5d} {figure.read_layout_ms:8.1f} {figure.map_ms:7.1f}"
            f" {figure.assign_ms:7.1f} {figure.total_ms:8.1f}  ({figure.skeleton_ms:8.1f} {figure.pack_ms:8.1f})"
        )


if __name__ == "__main__":
    main()
