"""`python -m bench.gpu.donor RIG`: stands in for the loader: random weights on each GPU, packed and donated."""

import json
import secrets
import sys
import time
from pathlib import Path

from appliance import configs, memfd
from appliance.client import KeeperClient
from appliance.record import ShardRecord
from appliance.slabs.devices import backend
from appliance.tensors.checksum import checksums
from appliance.tensors.packing import pack
from bench.gpu.device import prepared, synchronize, torch_device
from bench.gpu.model import random_model
from bench.gpu.rig import ROLE, Rig, read_rig
from bench.gpu.sampler import MemorySampler

CONNECT_TIMEOUT_S = 30.0


def main() -> int:
    rig = read_rig(Path(sys.argv[1]))
    with prepared() as uuids, KeeperClient.connect(rig.socket_path, timeout_s=CONNECT_TIMEOUT_S) as client:
        for rank, device in enumerate(rig.devices):
            donate(rig, client, rank, index=uuids.index(device))
    return 0


def donate(rig: Rig, client: KeeperClient, rank: int, *, index: int) -> None:
    """Fill one rank's slot, and leave its checksums, its times and the device memory that it took."""
    device = rig.devices[rank]
    client.offer(role=ROLE, rank=rank, client="donor", target=rig.target)
    client.progress("making weights")
    slabs = backend(device)
    with MemorySampler(device) as making:
        model = random_model(rig.tensors, rig.size_bytes, torch_device(index), seed=rank)
        synchronize()
    client.progress("packing the weights")
    started = time.monotonic()
    with MemorySampler(device) as packing:
        packed = pack(model, slabs, slab_bytes=rig.slab_bytes)
        synchronize()
    pack_s = time.monotonic() - started
    mappings = slabs.map_all(packed.slabs, packed.layout.slab_sizes)
    started = time.monotonic()
    found = checksums(mappings)
    checksum_s = time.monotonic() - started
    for mapping in mappings:
        mapping.close()
    record = ShardRecord(
        shard_id=secrets.token_hex(8),
        role=ROLE,
        rank=rank,
        device=device,
        fingerprint=rig.fingerprint(rank),
        target=rig.target,
        signer="bench",
        slab_sizes=packed.layout.slab_sizes,
        checksums=found,
        phases_s={"pack": pack_s},
    )
    facts = {
        "runs": rig.donated(rank)["runs"] + 1 if rig.donated_path(rank).exists() else 1,
        "checksums": found,
        "pack_s": pack_s,
        "checksum_s": checksum_s,
        "slabs": len(packed.layout.slab_sizes),
        "slab_bytes": max(packed.layout.slab_sizes),
        "size_bytes": sum(packed.layout.slab_sizes),
        "base_bytes": making.start_bytes,
        "weights_bytes": making.end_bytes - making.start_bytes,
        "peak_bytes": packing.peak_bytes - making.start_bytes,
        "packed_bytes": packing.end_bytes - making.start_bytes,
        "samples": packing.samples,
    }
    # Before the donation: whoever sees the shard can read what it should be.
    whole = rig.donated_path(rank).with_suffix(".new")
    whole.write_text(json.dumps(facts))
    whole.rename(rig.donated_path(rank))
    with (
        memfd.sealed("record", [record.encode(packed.layout.encode())]) as held,
        configs.pack({"config.json": b"{}"}) as packed_configs,
    ):
        client.donate(held, packed_configs, packed.slabs)
    packed.close()


if __name__ == "__main__":
    sys.exit(main())
