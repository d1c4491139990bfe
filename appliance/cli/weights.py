"""Commands that act on resident weights."""

import json
import os
from typing import TYPE_CHECKING

from appliance.cli.options import MANIFEST, ForceOption, JsonOption, ManifestOption, ModelArgument
from appliance.client import KeeperClient, RefusedError
from appliance.errors import ConfigError, MissError, ResourceError, TrustError
from appliance.host.applied import running
from appliance.manifest.load import load_manifest
from appliance.quantities import format_size
from appliance.verdict import Reason

if TYPE_CHECKING:
    from appliance.tensors.scrub import Scrubbed

SCRUB_NICENESS = 10

_HINTS = {
    Reason.LEASED: "stop that engine first, or use --force",
    Reason.LOADING: "wait until they are loaded, or use --force",
}


def evict(model: ModelArgument, manifest: ManifestOption = MANIFEST, force: ForceOption = False) -> None:
    """Free a model's weights now. Refused while an engine has them attached, unless forced."""
    parsed = load_manifest(running(manifest))
    parsed.model(model)
    with KeeperClient.connect(parsed.socket_path(model)) as client:
        try:
            size_bytes = client.evict(force=force)
        except RefusedError as error:
            reason = error.verdict.reason
            if reason is None or (hint := _HINTS.get(reason)) is None:
                raise
            raise ResourceError(f"{model}: {error.verdict.detail}", hint=hint) from error
    print(f"{model}: freed {format_size(size_bytes)}")


def scrub(model: ModelArgument, manifest: ManifestOption = MANIFEST, as_json: JsonOption = False) -> None:
    """Read a model's resident weights where they lie, and compare them with the checksums of when they were loaded.

    Ends with 77 where bytes changed, naming the slab, and with 69 where the weights are not resident.
    """
    parsed = load_manifest(running(manifest))
    parsed.model(model)
    with KeeperClient.connect(parsed.socket_path(model)) as client:
        shards = _scrubbed(client, model)
    damaged = {(shard.record.role, shard.record.rank): shard.damaged for shard in shards if shard.damaged}
    if as_json:
        print(json.dumps({"model": model, "damaged": bool(damaged), "shards": [one.to_json() for one in shards]}))
    else:
        for shard in shards:
            print(f"{model}: {_line(shard)}")
    if damaged:
        places = "; ".join(f"{role} rank {rank}: slab {_numbers(slabs)}" for (role, rank), slabs in damaged.items())
        raise TrustError(
            f"{model}: resident weights are not what was loaded: {places}",
            hint=f"stop its engine, `appliance evict {model}`, then restart weights@{model}: it loads anew",
        )


def _scrubbed(client: KeeperClient, model: str) -> "list[Scrubbed]":
    shards = client.status()["shards"]
    if not shards:
        raise MissError(f"{model}: no weights are resident", hint="appliance status says why")
    os.nice(SCRUB_NICENESS)  # whoever serves on the same cores comes first
    # Before CUDA is first used: it opens what it sees, and there may be GPUs that are none of this model's.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join({shard["device"]: "" for shard in shards if shard["device"] != "cpu"})
    try:
        from appliance.tensors.scrub import scrub as scrub_shard
    except ImportError as error:
        raise ConfigError(f"a scrub needs torch: {error}", hint="pip install 'appliance[engine]'") from error
    return [scrub_shard(client, role=shard["role"], rank=shard["rank"], name="scrub") for shard in shards]


def _line(shard: "Scrubbed") -> str:
    record = shard.record
    found = f"DAMAGED in slab {_numbers(shard.damaged)}" if shard.damaged else "intact"
    rate = record.size_bytes / max(shard.seconds, 1e-9) / 1e9
    size = f"{format_size(record.size_bytes)} in {len(record.slab_sizes)} slabs"
    return (
        f"{record.role} rank {record.rank} on {record.device}: {found} ({size}, {shard.seconds:.3f} s, {rate:.1f} GB/s)"
    )


def _numbers(slabs: tuple[int, ...]) -> str:
    return ", ".join(map(str, slabs))
