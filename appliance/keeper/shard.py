"""One shard as a keeper holds it: the record's descriptor, the configs, and the slabs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from appliance import memfd, record
from appliance.descriptors import Descriptor, close_all
from appliance.errors import PeerError
from appliance.record import ShardRecord

MAX_CONFIGS_BYTES = 512 << 20


@dataclass(frozen=True)
class Shard:
    """Owns its descriptors; slabs are in the order of `record.slab_sizes`."""

    record: ShardRecord
    held: Descriptor
    configs: Descriptor
    slabs: tuple[Descriptor, ...]

    @property
    def slot(self) -> tuple[str, int]:
        return self.record.role, self.record.rank

    def close(self) -> None:
        close_all((self.held, self.configs, *self.slabs))


def checked(held: Descriptor, configs: Descriptor, slabs: Sequence[Descriptor]) -> Shard:
    """Return the shard that these descriptors are; PeerError unless all are sealed and of the sizes the record says.

    Takes ownership of the descriptors only when it returns.
    """
    shard_record = read_record(held)
    if not memfd.is_sealed(configs.fileno()):
        raise PeerError("configs: not a sealed memory file")
    if os.fstat(configs.fileno()).st_size > MAX_CONFIGS_BYTES:
        raise PeerError(f"configs: more than {MAX_CONFIGS_BYTES} bytes")
    if len(slabs) != len(shard_record.slab_sizes):
        raise PeerError(f"shard of {len(shard_record.slab_sizes)} slabs came with {len(slabs)}")
    if shard_record.device == "cpu":
        for index, (slab, size_bytes) in enumerate(zip(slabs, shard_record.slab_sizes, strict=True)):
            if not memfd.is_sealed(slab.fileno()):
                raise PeerError(f"slab {index}: not a sealed memory file")
            if (found := os.fstat(slab.fileno()).st_size) != size_bytes:
                raise PeerError(f"slab {index}: {found} bytes, the record says {size_bytes}")
    return Shard(shard_record, held, configs, tuple(slabs))


def read_record(held: Descriptor) -> ShardRecord:
    """Return the header of a record's memfd, without its layout; PeerError where it is not one."""
    fd = held.fileno()
    if not memfd.is_sealed(fd):
        raise PeerError("shard record: not a sealed memory file")
    if (size_bytes := os.fstat(fd).st_size) > record.MAX_RECORD_BYTES:
        raise PeerError(f"shard record: {size_bytes} bytes, more than {record.MAX_RECORD_BYTES}")
    return record.decode_header(os.pread(fd, min(size_bytes, record.MAX_HEADER_BYTES), 0))
