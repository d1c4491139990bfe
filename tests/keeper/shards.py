"""Shards to test with: tiny ones, whole or broken in one way."""

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance import configs, memfd
from appliance.descriptors import Descriptor, close_all
from appliance.fingerprint import ROOT_DIGEST, Fingerprint
from appliance.keeper.settings import KeeperSettings, Refusal, Slot
from appliance.keeper.shard import Shard, checked
from appliance.record import ShardRecord

PAGE = 4096
TARGET = Fingerprint.of({ROOT_DIGEST: "a" * 64, "setting.dtype": "bfloat16"})
OTHER_TARGET = Fingerprint.of({ROOT_DIGEST: "b" * 64, "setting.dtype": "bfloat16"})
LAYOUT = b'{"layout":"of these slabs"}'


@dataclass(frozen=True)
class Donation:
    """What a donor sends: record, configs, slabs. The caller closes it."""

    record: ShardRecord
    held: Descriptor
    configs: Descriptor
    slabs: tuple[Descriptor, ...]

    def close(self) -> None:
        close_all((self.held, self.configs, *self.slabs))


@dataclass(frozen=True, eq=False)
class Filling:
    """Whoever fills slots, without a connection."""

    client: str = "donor"
    pid: int = 1


def fingerprint_of(target: Fingerprint, rank: int = 0, **more: str) -> Fingerprint:
    return Fingerprint.of({**target.to_json(), "rank": rank, "engine": "test", **more})


def record_of(target: Fingerprint = TARGET, *, rank: int = 0, slabs: int = 2, **changes: Any) -> ShardRecord:
    record = ShardRecord(
        shard_id=secrets.token_hex(8),
        role="target",
        rank=rank,
        device="cpu",
        fingerprint=fingerprint_of(target, rank),
        target=target,
        signer="ab12",
        slab_sizes=(PAGE,) * slabs,
        files={"model.safetensors": (1, 2, 3, 4, 5)},
        phases_s={"load": 1.5, "verify": 0.5},
    )
    return replace(record, **changes)


def donation_of(
    target: Fingerprint = TARGET,
    *,
    rank: int = 0,
    slabs: int = 2,
    bodies: Sequence[bytes] | None = None,
    **changes: Any,
) -> Donation:
    """Return a whole shard, its record changed as asked; `bodies` are the bytes of the slabs."""
    record = record_of(target, rank=rank, slabs=slabs, **changes)
    filling = bodies if bodies is not None else [bytes([index + 1]) * PAGE for index in range(slabs)]
    return Donation(
        record,
        memfd.sealed("record", [record.encode(LAYOUT)]),
        configs.pack({"config.json": b"{}"}),
        tuple(memfd.sealed(f"slab {index}", [body]) for index, body in enumerate(filling)),
    )


def shard_of(target: Fingerprint = TARGET, *, rank: int = 0, slabs: int = 2, **changes: Any) -> Shard:
    donation = donation_of(target, rank=rank, slabs=slabs, **changes)
    return checked(donation.held, donation.configs, donation.slabs)


def unsealed(body: bytes) -> Descriptor:
    descriptor = memfd.create("unsealed")
    os.write(descriptor.fileno(), body)
    return descriptor


def slots(count: int = 1) -> tuple[Slot, ...]:
    return tuple(Slot("target", rank, "cpu") for rank in range(count))


def settings_json(
    runtime: Path,
    *,
    target: Fingerprint | None = TARGET,
    ranks: int = 1,
    refusal: Refusal | None = None,
    loader: Sequence[str] = ("/bin/false",),
    gid: int | None = None,
    health_port: int | None = None,
    crowded: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what `python -m appliance.target` would print."""
    return {
        "model": "m",
        "runtime": str(runtime),
        "gid": gid,
        "health": None if health_port is None else {"host": "127.0.0.1", "port": health_port},
        "slots": [{"role": "target", "rank": rank, "device": "cpu"} for rank in range(ranks)],
        "signer": "ab12",
        "target": None if target is None or refusal is not None else target.to_json(),
        "refusal": None if refusal is None else {"detail": refusal.detail, "exit_status": refusal.exit_status},
        "loader": list(loader),
        "crowded": list(crowded),
    }


def settings_of(runtime: Path, **changes: Any) -> KeeperSettings:
    from appliance.keeper.settings import decode

    return decode(json.dumps(settings_json(runtime, **changes)).encode())
