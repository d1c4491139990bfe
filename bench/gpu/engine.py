"""`python -m bench.gpu.engine RIG [--rank N] [--repeat N] [--hold]`: stands in for an engine that attaches.

Prints a JSON line for each attach, with its times in milliseconds and whether every slab has its donated checksum.
With --hold it then prints one for each line that it reads: the checksums of what it has mapped, taken again.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from appliance.client import KeeperClient
from appliance.descriptors import Descriptor, close_all, make_room
from appliance.handover.binding import bind
from appliance.slabs.devices import backend
from appliance.slabs.interface import Backend, Mapping
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
        self._mapped: list[_Mapped] = []

    def __enter__(self) -> "attached":
        rig, rank = self._rig, self._rank
        device = backend(rig.devices[rank])
        self.model = skeleton(rig.tensors, rig.size_bytes)
        self._attach(device)
        return self

    def _attach(self, device: Backend) -> None:
        rig, rank = self._rig, self._rank
        marks = [time.perf_counter()]
        self._client = KeeperClient.connect(rig.socket_path)
        described = self._client.describe(role=ROLE, rank=rank, wait_s=0)
        described.configs.close()
        marks.append(time.perf_counter())
        slabs = self._client.attach(role=ROLE, rank=rank, client="engine", fingerprint=rig.fingerprint(rank))
        marks.append(time.perf_counter())
        timed = _TimedMapping(device)
        bind(self.model, described.layout, cast("Backend", timed), slabs, described.record.slab_sizes)
        marks.append(time.perf_counter())
        last = list(self.model.parameters())[-1]
        self.last_sum = float(last.view(torch.int16)[-1].to(torch.float64).sum())  # read by the device itself
        marks.append(time.perf_counter())
        close_all(slabs)
        self._mapped = timed.mapped
        names = ("describe", "receive", "bind", "first_use")
        times_ms = {
            f"{name}_ms": 1e3 * (end - start) for name, start, end in zip(names, marks[:-1], marks[1:], strict=True)
        }
        slabs_ms = {"map_ms": timed.map_ms, "slabs": len(slabs)}
        self.times_ms = {"total_ms": 1e3 * (marks[3] - marks[0]), **times_ms, **slabs_ms}
        self.shard_id = described.record.shard_id

    def checked(self) -> dict[str, Any]:
        """Return whether all that is mapped has the checksums it was donated with."""
        started = time.perf_counter()
        found = list(checksums(cast("list[Mapping]", self._mapped)))
        checksum_ms = 1e3 * (time.perf_counter() - started)
        expected = self._rig.donated(self._rank)["checksums"]
        return {"shard_id": self.shard_id, "intact": found == expected, "checksum_ms": checksum_ms, "fake": is_fake()}

    def __exit__(self, *error: object) -> None:
        self.model.to("meta")
        self._mapped.clear()
        self._client.close()


class _Mapped:
    """A slab as tensors lie in it, still to be read after its mapping was closed."""

    def __init__(self, mapping: Mapping) -> None:
        self.device, self.size_bytes = mapping.device, mapping.size_bytes
        self._window = mapping.window(0, mapping.size_bytes)

    def window(self, offset_bytes: int, size_bytes: int) -> object:
        assert (offset_bytes, size_bytes) == (0, self.size_bytes)
        return self._window


class _TimedMapping:
    """A backend that maps, keeps what it mapped, and tells how long that took in the thread that asked."""

    def __init__(self, device: Backend) -> None:
        self._device = device
        self.mapped: list[_Mapped] = []
        self.map_ms = 0.0

    def map_all(self, descriptors: Sequence[Descriptor], sizes_bytes: Sequence[int]) -> list[Mapping]:
        started = time.perf_counter()
        mappings = self._device.map_all(descriptors, sizes_bytes)
        self.map_ms = 1e3 * (time.perf_counter() - started)
        self.mapped = [_Mapped(mapping) for mapping in mappings]
        return mappings


def _say(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
