"""Which bytes of which storages a set of tensors needs, each byte once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from appliance.layout import ALIGNMENT_BYTES, TensorSpec
from appliance.tensors.storage import bytes_of


@dataclass
class Stretch:
    """Memory from one address up to another, which these tensors (by index) share."""

    start: int
    end: int
    tensors: list[int]
    storages: set[int]

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    def pieces(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield offset and bytes of every part: one for each storage, which is one unless storages overlap."""
        first: dict[int, torch.Tensor] = {}
        for index in self.tensors:
            first.setdefault(tensors[index].untyped_storage().data_ptr(), tensors[index])
        for address, tensor in first.items():
            start = max(self.start, address)
            end = min(self.end, address + tensor.untyped_storage().nbytes())
            yield start - self.start, bytes_of(tensor, start - address, end - start)


def stretches(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], *, limit_bytes: int) -> list[Stretch]:
    """Return the stretches that hold all tensors with elements, in the order of their first tensors.

    Tensors that overlap in memory, through one storage or several, are in one stretch. Those that only lie side by
    side in one storage are too, as long as the stretch stays within the limit: a whole file may be one storage. A
    stretch starts at a multiple of the alignment in its storage, so that what was aligned stays it.
    """
    found: list[Stretch] = []
    before = None
    for device, start, end, storage, index in sorted(_extents(tensors, specs)):
        last = found[-1] if found and device == before else None
        if last is not None and (start < last.end or _beside(last, start, end, storage, limit_bytes)):
            last.end = max(last.end, end)
            last.tensors.append(index)
            last.storages.add(storage)
        else:
            aligned = storage + (start - storage) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            found.append(Stretch(aligned, end, [index], {storage}))
        before = device
    return sorted(found, key=lambda stretch: min(stretch.tensors))


def _extents(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> Iterator[tuple[str, int, int, int, int]]:
    for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        start, extent_bytes = tensor.data_ptr(), spec.extent_bytes
        if extent_bytes:
            yield str(tensor.device), start, start + extent_bytes, tensor.untyped_storage().data_ptr(), index


def _beside(last: Stretch, start: int, end: int, storage: int, limit_bytes: int) -> bool:
    return storage in last.storages and start - last.end < ALIGNMENT_BYTES and end - last.start <= limit_bytes
