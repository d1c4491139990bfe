"""One shard as a keeper holds it: the record's descriptor, the configs, and the slabs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from appliance import configs as packed_configs
from appliance import memfd, record
from appliance.descriptors import Descriptor, close_all
from appliance.errors import PeerError
from appliance.record import ShardRecord

BLOCK_BYTES = 512  # of st_blocks


@dataclass(frozen=True, eq=False)
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
    """Return the shard that these descriptors are; PeerError unless all of this holds.

    1. the record is a sealed memory file with a header of the form that record.py describes
    2. the configs are a sealed memory file, not larger than an engine would read
    3. there are as many slabs as the record says
    4. in host memory: each slab is sealed, of the size that the record says, and all of it is in memory
    5. in host memory: none is the same file as another. The service manager keeps one file only once

    Takes ownership of the descriptors only when it returns.
    """
    shard_record = read_record(held)
    if not memfd.is_sealed(configs.fileno()):
        raise PeerError("configs: not a sealed memory file")
    if os.fstat(configs.fileno()).st_size > packed_configs.MAX_BYTES:
        raise PeerError(f"configs: more than {packed_configs.MAX_BYTES} bytes")
    if len(slabs) != len(shard_record.slab_sizes):
        raise PeerError(f"shard of {len(shard_record.slab_sizes)} slabs came with {len(slabs)}")
    if shard_record.device == "cpu":
        for index, (slab, size_bytes) in enumerate(zip(slabs, shard_record.slab_sizes, strict=True)):
            _check_slab(slab.fileno(), index, size_bytes)
        if len({_file(descriptor) for descriptor in (held, configs, *slabs)}) < len(slabs) + 2:
            raise PeerError("shard: one memory file came more than once")
    return Shard(shard_record, held, configs, tuple(slabs))


def read_record(held: Descriptor) -> ShardRecord:
    """Return the header of a record's memfd, without its layout; PeerError where it is not one."""
    fd = held.fileno()
    if not memfd.is_sealed(fd):
        raise PeerError("shard record: not a sealed memory file")
    if (size_bytes := os.fstat(fd).st_size) > record.MAX_RECORD_BYTES:
        raise PeerError(f"shard record: {size_bytes} bytes, more than {record.MAX_RECORD_BYTES}")
    return record.decode_header(os.pread(fd, min(size_bytes, record.MAX_HEADER_BYTES), 0))


def _check_slab(fd: int, index: int, size_bytes: int) -> None:
    if not memfd.is_sealed(fd):
        raise PeerError(f"slab {index}: not a sealed memory file")
    status = os.fstat(fd)
    if status.st_size != size_bytes:
        raise PeerError(f"slab {index}: {status.st_size} bytes, the record says {size_bytes}")
    # A hole would be allocated when an engine first reads it, and engines refuse such slabs.
    if status.st_blocks * BLOCK_BYTES < size_bytes:
        raise PeerError(f"slab {index}: only {status.st_blocks * BLOCK_BYTES} of its {size_bytes} bytes are in memory")


def _file(descriptor: Descriptor) -> tuple[int, int]:
    status = os.fstat(descriptor.fileno())
    return status.st_dev, status.st_ino
