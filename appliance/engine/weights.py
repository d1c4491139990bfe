"""Attach or donate, the one way by which the built-in engine and its loader come to weights.

describe -> check the files -> fingerprint -> attach          the keeper has the shard: `hit`
offer -> load from disk, verified -> pack -> donate -> attach  it has not, and this process may: `donated`
"""

import hashlib
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from appliance import collector, configs, memfd
from appliance import layout as layouts
from appliance.checkpoint.contents import check_configs
from appliance.checkpoint.findings import check_all
from appliance.checkpoint.identity import check_files, check_stats
from appliance.checkpoint.stat_record import FileStat
from appliance.client import KeeperClient, RefusedError
from appliance.descriptors import Descriptor, close_all
from appliance.engine import disk
from appliance.engine.configs import load_config
from appliance.engine.device import RANK, device_facts, device_of
from appliance.engine.model import skeleton
from appliance.errors import ApplianceError, ConfigError, MissError, PeerError, ResourceError, TrustError
from appliance.fingerprint import Fingerprint
from appliance.record import ShardRecord
from appliance.slabs.devices import backend
from appliance.target import Target
from appliance.tensors.attachment import attach
from appliance.tensors.packing import pack
from appliance.verdict import Outcome, Reason, Verdict, refused

ROLE: Final = "target"
STAGE: Final = "loaded"  # transformers has nothing left to do to the weights once they are loaded


@dataclass
class Weights:
    """A module whose weights are in place, the open connection that leases them, and how long each phase took."""

    module: torch.nn.Module
    configs: dict[str, bytes]
    verdict: Verdict
    record: ShardRecord
    client: KeeperClient | None
    phases_s: dict[str, float] = field(default_factory=dict)


def obtain(target: Target, *, client_name: str, on_progress: Callable[[str], None] = lambda text: None) -> Weights:
    """Return the model with its weights in place, in the way the manifest allows.

    TrustError where the checkpoint on disk is not what was verified; MissError where the keeper has not got these
    weights and `on_miss` is `fail`; ResourceError where that may change soon. Never a private second copy.
    """
    deadline = time.monotonic() + target.model.wait_s
    client = KeeperClient.connect(target.socket_path, timeout_s=target.model.wait_s)
    try:
        weights = _obtain(client, target, client_name=client_name, deadline=deadline, on_progress=on_progress)
    except BaseException:
        client.close()
        raise
    if target.model.mode == "copy":
        # The engine owns a clone and the keeper may let go of its shard: there is nothing to lease.
        client.close()
        weights.client = None
    return weights


def load_and_donate(target: Target, client: KeeperClient, *, client_name: str) -> Weights:
    """Fill this model's empty slot from disk; RefusedError where the keeper does not want that."""
    client.offer(role=ROLE, rank=RANK, client=client_name, target=target.fingerprint)
    return _fill(client, target, on_progress=client.progress)


def _obtain(
    client: KeeperClient, target: Target, *, client_name: str, deadline: float, on_progress: Callable[[str], None]
) -> Weights:
    while True:
        try:
            return _attach(client, target, client_name=client_name, deadline=deadline, on_progress=on_progress)
        except RefusedError as error:
            if not _may_load(error.verdict, target, deadline):
                raise _fatal(error.verdict, target) from error
            replace = error.verdict.reason is Reason.FINGERPRINT_DIFFERS
        if weights := _donate(client, target, client_name=client_name, replace=replace, on_progress=on_progress):
            return weights


def _attach(
    client: KeeperClient, target: Target, *, client_name: str, deadline: float, on_progress: Callable[[str], None]
) -> Weights:
    began = time.monotonic()
    # Who may load waits only for somebody else's load, not for one that nobody has started.
    wait_s = 0.0 if target.model.on_miss == "load" else max(deadline - began, 0.0)
    try:
        described = client.describe(role=ROLE, rank=RANK, wait_s=wait_s, on_progress=on_progress)
    except RefusedError as error:
        if target.model.on_miss != "load" or error.verdict.reason is not Reason.LOADING:
            raise
        wait_s = max(deadline - time.monotonic(), 0.0)
        described = client.describe(role=ROLE, rank=RANK, wait_s=wait_s, on_progress=on_progress)
    resident = time.monotonic()
    with described.configs:
        files = configs.unpack(described.configs)
    try:
        _check_files(target, described.record, files)
    except TrustError as error:
        client.report(refused(Reason.FILE_DIFFERS, str(error)), {})
        raise
    checked = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="appliance-configs-") as folder:
        configs.write(files, Path(folder))
        fingerprint = take_fingerprint(target, Path(folder))
        configured = time.monotonic()
        slabs = client.attach(role=ROLE, rank=RANK, client=client_name, fingerprint=fingerprint)
        received = time.monotonic()
        module = skeleton(Path(folder), dtype=target.model.dtype)
    built = time.monotonic()
    _bind(module, described.layout, described.record, slabs, copy=target.model.mode == "copy")
    bound = time.monotonic()
    phases = {
        "wait": resident - began,
        "check": checked - resident,
        "config": configured - checked,
        "skeleton": built - received,
        "attach": (received - configured) + (bound - built),
    }
    verdict = Verdict(Outcome.HIT)
    client.report(verdict, phases)
    return Weights(module, files, verdict, described.record, client, phases)


def _donate(
    client: KeeperClient, target: Target, *, client_name: str, replace: bool, on_progress: Callable[[str], None]
) -> Weights | None:
    """Load and donate; None where somebody else came first, so that attaching is to be tried again."""
    try:
        client.offer(role=ROLE, rank=RANK, client=client_name, target=target.fingerprint, replace=replace)
    except RefusedError as error:
        if error.verdict.reason in (Reason.LOADING, Reason.OCCUPIED) and not replace:
            return None
        raise _fatal(error.verdict, target) from error

    def tell(text: str) -> None:
        on_progress(text)
        client.progress(text)

    return _fill(client, target, on_progress=tell)


def _fill(client: KeeperClient, target: Target, *, on_progress: Callable[[str], None]) -> Weights:
    loaded = disk.load_verified(target, on_progress=on_progress)
    with tempfile.TemporaryDirectory(prefix="appliance-configs-") as folder:
        configs.write(loaded.configs, Path(folder))
        fingerprint = take_fingerprint(target, Path(folder))
    began = time.monotonic()
    on_progress("packing the weights")
    packed = pack(loaded.module, backend(device_of(target)))
    phases = loaded.phases_s | {"pack": time.monotonic() - began}
    record = ShardRecord(
        shard_id=secrets.token_hex(8),
        role=ROLE,
        rank=RANK,
        device=device_of(target),
        fingerprint=fingerprint,
        target=target.fingerprint,
        signer=target.identity.signer,
        slab_sizes=packed.layout.slab_sizes,
        files={path: stat.to_json() for path, stat in loaded.files.items()},
        phases_s=phases,
    )
    layout = packed.layout.encode()
    slabs = tuple(packed.slabs)
    try:
        with memfd.sealed("record", [record.encode(layout)]) as held, configs.pack(loaded.configs) as packed_configs:
            client.donate(held, packed_configs, slabs)
    except BaseException:
        close_all(slabs)
        raise
    # The donor goes on exactly as one who attaches does: over the sealed memory, not over what it loaded.
    _bind(loaded.module, layout, record, slabs, copy=target.model.mode == "copy")
    verdict = Verdict(Outcome.DONATED)
    client.report(verdict, phases)
    return Weights(loaded.module, loaded.configs, verdict, record, client, phases)


def take_fingerprint(target: Target, configs_dir: Path) -> Fingerprint:
    """Return every fact that shapes this engine's bytes: the target's, and what the configs settle."""
    config = load_config(configs_dir, dtype=target.model.dtype)
    facts: dict[str, object] = target.fingerprint.to_json() | {
        "role": ROLE,
        "rank": RANK,
        "stage": STAGE,
        **device_facts(device_of(target)),
        "model.architecture": ",".join(config.architectures or ()),
        "model.type": config.model_type,
        "model.dtype": str(config.dtype).removeprefix("torch."),
        "config.sha256": hashlib.sha256((configs_dir / "config.json").read_bytes()).hexdigest(),
    }
    return Fingerprint.of(facts)


def _check_files(target: Target, record: ShardRecord, files: Mapping[str, bytes]) -> None:
    """Compare the checkpoint on disk with what was verified when this shard was loaded, as far as `verify` says.

    Where the shard is of another checkpoint there is nothing to compare: the fingerprints will differ.
    """
    identity = target.identity
    if record.fingerprint.root_digest != identity.root_digest:
        return
    if target.model.verify == "full":
        check_all(identity).require_none(identity)
    elif target.model.verify == "stat":
        recorded = {path: FileStat.from_json(facts) for path, facts in record.files.items()}
        # A file that was only touched is hashed, and good; the record keeps its old stat until the next load.
        check_files(identity, check_stats(identity, recorded))
    check_configs(identity.manifest, files)


def _bind(
    module: torch.nn.Module, layout: bytes, record: ShardRecord, slabs: tuple[Descriptor, ...], *, copy: bool
) -> None:
    device = backend(record.device)
    mappings = []
    try:
        with collector.paused():
            for slab, size_bytes in zip(slabs, record.slab_sizes, strict=True):
                mappings.append(device.map(slab, size_bytes))
            attach(module, layouts.decode(layout), mappings, copy=copy, stage=STAGE)
    finally:
        # Tensors keep what they lie in mapped; the descriptors are needed no longer.
        for mapping in mappings:
            mapping.close()
        close_all(slabs)


def _may_load(verdict: Verdict, target: Target, deadline: float) -> bool:
    if target.model.on_miss != "load" or time.monotonic() > deadline:
        return False
    return verdict.reason in (Reason.NOT_RESIDENT, Reason.LOADER_FAILED, Reason.FINGERPRINT_DIFFERS)


def _fatal(verdict: Verdict, target: Target) -> ApplianceError:
    unit = f"weights@{target.name}"
    match verdict.reason:
        case Reason.FINGERPRINT_DIFFERS | Reason.TARGET_DIFFERS:
            return MissError(f"the keeper holds other weights: {verdict}", hint=f"restart {unit} to load these")
        case Reason.NOT_RESIDENT | Reason.LOADER_FAILED | Reason.CHECKPOINT_REFUSED:
            return MissError(f"no weights to attach: {verdict}", hint=f"see the messages of {unit}")
        case Reason.LOADING | Reason.LEASED | Reason.BUSY | Reason.OCCUPIED:
            return ResourceError(f"not now: {verdict}", hint="set a longer `wait`, or try again")
        case Reason.NOT_PERMITTED:
            return ConfigError(str(verdict), hint="the engine's user must be in the manifest's group")
        case _:
            return PeerError(str(verdict))
