"""`python -m bench.gpu.scrubber RIG`: what `appliance scrub` does, of a shard of the bench, and how long it took."""

import argparse
import json
import time
from pathlib import Path

from appliance.client import KeeperClient
from appliance.tensors.scrub import scrub
from bench.gpu.device import prepared
from bench.gpu.rig import ROLE, read_rig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rig", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    rig = read_rig(args.rig)
    with prepared():
        began = time.monotonic()
        with KeeperClient.connect(rig.socket_path) as client:
            found = [scrub(client, role=ROLE, rank=args.rank, name="scrub") for _ in range(2)]
        total_s = time.monotonic() - began
    print(
        json.dumps(
            {
                "size_bytes": found[0].record.size_bytes,
                "first_s": found[0].seconds,
                "again_s": found[1].seconds,
                "total_s": total_s,
                "damaged": [*found[0].damaged, *found[1].damaged],
            }
        )
    )


if __name__ == "__main__":
    main()
