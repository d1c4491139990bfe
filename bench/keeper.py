"""What a keeper costs beside its slabs: its resident memory while it holds the real model, before and after a kill.

python -m bench.keeper [--json]
"""

import argparse
import asyncio
import json
from pathlib import Path

from appliance.client import KeeperClient
from appliance.demo.cache import default_cache
from appliance.demo.model import obtain
from appliance.demo.workplace import MODEL, Workplace
from appliance.manifest.load import load_manifest
from appliance.up.supervisor import Supervisor
from appliance.up.units import units
from bench.restart import READY_TIMEOUT_S, WEIGHTS, Silent


async def measure(workplace: Workplace) -> dict[str, float]:
    """Return resident memory in MB, and the seconds from SIGKILL until the keeper answers again."""
    workplace.sign()
    manifest = load_manifest(workplace.manifest)
    socket = manifest.socket_path(MODEL)
    keeper = [unit for unit in units(manifest, workplace.manifest) if unit.name == WEIGHTS]
    manifest.directories.runtime.mkdir()
    async with Supervisor(keeper, Silent(), runtime=manifest.directories.runtime) as supervisor:
        await supervisor.wait_ready(WEIGHTS, READY_TIMEOUT_S)
        held, before_mb = _look(socket)
        began = asyncio.get_running_loop().time()
        await supervisor.kill(WEIGHTS)
        await supervisor.wait_ready(WEIGHTS, READY_TIMEOUT_S)
        back_s = asyncio.get_running_loop().time() - began
        kept, after_mb = _look(socket)
    if kept != held:
        raise SystemExit("the killed keeper came back with other weights")
    return {"held_mb": held[1] / 1e6, "loaded_mb": before_mb, "adopted_mb": after_mb, "kill_to_ready_s": back_s}


def _look(socket: Path) -> tuple[tuple[str, int], float]:
    """Return shard and bytes that a keeper holds, and its resident memory in MB."""
    with KeeperClient.connect(socket) as client:
        status = client.status()
    lines = Path(f"/proc/{status['pid']}/status").read_text().splitlines()
    resident_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return (status["shards"][0]["shard_id"], status["size_bytes"]), resident_kb * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with Workplace(obtain(default_cache(), on_progress=lambda text: None)) as workplace:
        found = asyncio.run(measure(workplace))
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"weights held: {found['held_mb']:.1f} MB")
    print(f"keeper that had them loaded: {found['loaded_mb']:.1f} MB resident")
    print(f"keeper that took them back after SIGKILL: {found['adopted_mb']:.1f} MB resident")
    print(f"SIGKILL to READY=1: {found['kill_to_ready_s']:.2f} s")


if __name__ == "__main__":
    main()
