"""`python -m bench.gpu.engine RIG [--rank N] [--repeat N] [--hold]`: stands in for an engine that attaches.

Prints a JSON line for each attach, with its times in milliseconds and whether every slab has its donated checksum.
With --hold it then prints one for each line that it reads: the checksums of what it has mapped, taken again.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from appliance import collector
from appliance import layout as layouts
from appliance.client import KeeperClient
from appliance.descriptors import close_all, make_room
from appliance.slabs.devices import backend
from appliance.slabs.interface import Backend, Mapping
from appliance.tensors.attachment import attach
from appliance.tensors.checksum import checksums
from bench.gpu.device import is_fake, prepared
from bench.gpu.model import skeleton
from bench.gpu.rig import ROLE, Rig, read_rig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rig", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--hold", action="store_true")
    args = parser.parse_args()
    rig = read_rig(args.rig)
    make_room()
    started = time.monotonic()
    with prepared():
        context_ms = 1e3 * (time.monotonic() - started)
        for _ in range(args.repeat):
            with attached(rig, args.rank) as engine:
                _say({"context_ms": context_ms, **engine.times_ms, **engine.checked()})
                while args.hold and sys.stdin.readline():
                    _say(engine.checked())


class attached:  # noqa: N801  used as a context manager
    """One attach from connect to the last tensor usable, and the lease that goes with it."""

    def __init__(self, rig: Rig, rank: int) -> None:
        self._rig = rig
        self._rank = rank
        self.times_ms: dict[str, float] = {}
        self._mappings: list[Mapping] = []

    def __enter__(self) -> "attached":
        rig, rank = self._rig, self._rank
        device = backend(rig.devices[rank])
        self.model = skeleton(rig.tensors, rig.size_bytes)
        with collector.paused():
            self._attach(device)
        return self

    def _attach(self, device: Backend) -> None:
        rig, rank = self._rig, self._rank
        marks = [time.perf_counter()]
        self._client = KeeperClient.connect(rig.socket_path)
        described = self._client.describe(role=ROLE, rank=rank, wait_s=0)
        described.configs.close()
        layout = layouts.decode(described.layout)
        marks.append(time.perf_counter())
        slabs = self._client.attach(role=ROLE, rank=rank, client="engine", fingerprint=rig.fingerprint(rank))
        marks.append(time.perf_counter())
        self._mappings = [device.map(slab, size) for slab, size in zip(slabs, layout.slab_sizes, strict=True)]
        close_all(slabs)
        marks.append(time.perf_counter())
        attach(self.model, layout, self._mappings)
        marks.append(time.perf_counter())
        last = list(self.model.parameters())[-1]
        self.last_sum = float(last.view(torch.int16)[-1].to(torch.float64).sum())  # read by the device itself
        marks.append(time.perf_counter())
        names = ("describe", "receive", "map", "assign", "first_use")
        times_ms = {
            f"{name}_ms": 1e3 * (end - start) for name, start, end in zip(names, marks[:-1], marks[1:], strict=True)
        }
        self.times_ms = {"total_ms": 1e3 * (marks[4] - marks[0]), **times_ms, "slabs": len(layout.slab_sizes)}
        self.shard_id = described.record.shard_id

    def checked(self) -> dict[str, Any]:
        """Return whether all that is mapped has the checksums it was donated with."""
        started = time.perf_counter()
        found = list(checksums(self._mappings))
        checksum_ms = 1e3 * (time.perf_counter() - started)
        expected = self._rig.donated(self._rank)["checksums"]
        return {"shard_id": self.shard_id, "intact": found == expected, "checksum_ms": checksum_ms, "fake": is_fake()}

    def __exit__(self, *error: object) -> None:
        self.model.to("meta")
        for mapping in self._mappings:
            mapping.close()
        self._client.close()


def _say(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
