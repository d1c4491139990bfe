"""Run on the host by bench/host.py: give a keeper weights in N slabs, restart it, and time its first answer.

    python host_keeper.py MODEL SLABS ROUNDS

The keeper must have been emptied before (`appliance evict MODEL --force`). Prints a JSON list of seconds, each from
`systemctl restart` to an answer of the new keeper that says it holds them.
"""

import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

from appliance import configs, memfd
from appliance.client import KeeperClient
from appliance.errors import ApplianceError
from appliance.fingerprint import Fingerprint
from appliance.record import ShardRecord
from appliance.target import Target, read_target

MANIFEST = Path("/var/lib/appliance-host/appliance.yaml")
SLAB_BYTES = 4096
POLL_S = 0.002
TIMEOUT_S = 60.0


def donate(target: Target, slabs: int) -> None:
    """Fill the slot with so many slabs: the keeper does not look into them, and no engine gets them."""
    record = ShardRecord(
        shard_id=secrets.token_hex(8),
        role="target",
        rank=0,
        device="cpu",
        fingerprint=Fingerprint.of(target.fingerprint.to_json() | {"engine": "none"}),
        target=target.fingerprint,
        signer="",
        slab_sizes=(SLAB_BYTES,) * slabs,
        files={},
        phases_s={},
    )
    with KeeperClient.connect(target.socket_path) as client:
        client.offer(role="target", rank=0, client="bench", target=target.fingerprint)
        held = memfd.sealed("record", [record.encode(b"{}")])
        packed = configs.pack({"config.json": b"{}"})
        client.donate(held, packed, [memfd.sealed(f"slab-{n}", [bytes(SLAB_BYTES)]) for n in range(slabs)])


def restart_s(target: Target) -> float:
    """Return the seconds until the next keeper answers that its weights are resident."""
    old = status(target)["pid"]
    began = time.monotonic()
    with subprocess.Popen(["systemctl", "restart", f"weights@{target.name}"]):
        while True:
            try:
                found = status(target)
                if found["pid"] != old and found["state"] == "resident":
                    return time.monotonic() - began
            except ApplianceError:
                pass
            if time.monotonic() - began > TIMEOUT_S:
                raise TimeoutError("the keeper did not come back")
            time.sleep(POLL_S)


def status(target: Target) -> dict[str, object]:
    with KeeperClient.connect(target.socket_path) as client:
        return client.status()


def main() -> None:
    name, slabs, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    target = read_target(MANIFEST, name)
    donate(target, slabs)
    print(json.dumps([restart_s(target) for _ in range(rounds)]))


if __name__ == "__main__":
    main()
