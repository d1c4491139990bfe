"""Compares a shard's resident bytes with the checksums that its donor took of them, as one more client of the keeper.

What it attaches it maps read-only and lets go of at once; meanwhile it has a lease, so that nobody evicts it unawares.
"""

import time
from dataclasses import dataclass
from typing import Any

from appliance.client import KeeperClient, RefusedError
from appliance.descriptors import close_all
from appliance.errors import MissError
from appliance.record import ShardRecord
from appliance.tensors.checksum import make_ready, slab_checksums
from appliance.verdict import Reason

_NOT_THERE = frozenset(
    (Reason.NOT_RESIDENT, Reason.LOADING, Reason.LOADER_FAILED, Reason.CHECKPOINT_REFUSED, Reason.UNKNOWN_SHARD)
)


@dataclass(frozen=True)
class Scrubbed:
    """What a scrub read: each slab's checksum now, beside that in the record, and how long mapping and reading took."""

    record: ShardRecord
    found: tuple[str, ...]
    seconds: float

    @property
    def damaged(self) -> tuple[int, ...]:
        """Return the numbers of the slabs that are not what was donated."""
        pairs = enumerate(zip(self.record.checksums, self.found, strict=True))
        return tuple(index for index, (donated, found) in pairs if donated != found)

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "role": record.role,
            "rank": record.rank,
            "device": record.device,
            "shard_id": record.shard_id,
            "size_bytes": record.size_bytes,
            "seconds": self.seconds,
            "slabs": [
                {"donated": donated, "found": found}
                for donated, found in zip(record.checksums, self.found, strict=True)
            ],
            "damaged": list(self.damaged),
        }


def scrub(client: KeeperClient, *, role: str, rank: int, name: str) -> Scrubbed:
    """Return what is in a resident shard's slabs, and tell the keeper; MissError where it is not resident.

    MissError too where its donor took no checksums. Errors of `slab_checksums` besides. The lease lasts until the
    client is closed.
    """
    try:
        described = client.describe(role=role, rank=rank, wait_s=0)
        described.configs.close()
        record = described.record
        if len(record.checksums) != len(record.slab_sizes):
            raise MissError(
                f"{role} rank {rank} was donated without checksums: there is nothing to compare it with",
                hint="checksums are taken when weights are loaded again",
            )
        slabs = client.attach(role=role, rank=rank, client=name, fingerprint=record.fingerprint)
        try:
            make_ready(record.device)
            began = time.monotonic()
            found = slab_checksums(record.device, slabs, record.slab_sizes)
            scrubbed = Scrubbed(record, found, time.monotonic() - began)
        finally:
            close_all(slabs)
        client.scrubbed(shard_id=record.shard_id, damaged=scrubbed.damaged)
    except RefusedError as error:
        if error.verdict.reason not in _NOT_THERE:
            raise
        raise MissError(f"{role} rank {rank} is not resident: {error.verdict.detail}") from error
    return scrubbed
