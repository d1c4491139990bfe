"""Attach or donate, whichever engine it is.

describe -> check the files -> fingerprint -> attach          the keeper has the shard: `hit`
offer -> load from disk, verified -> pack -> donate -> attach  it has not, and this process may: `donated`
"""

import contextlib
import gc
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from appliance import configs, memfd
from appliance.client import Description, KeeperClient, RefusedError
from appliance.descriptors import Descriptor, close_all
from appliance.errors import ApplianceError, ConfigError, MissError, PeerError, ResourceError, TrustError
from appliance.events import WARNING, event
from appliance.fingerprint import Fingerprint
from appliance.handover.binding import bind
from appliance.handover.source import Loaded, Source
from appliance.handover.terms import Terms
from appliance.record import ShardRecord
from appliance.slabs.devices import backend
from appliance.tensors.attachment import Awaited, confirm
from appliance.tensors.checksum import slab_checksums
from appliance.tensors.comparison import differences
from appliance.tensors.flags import set_flags
from appliance.tensors.homes import Stage
from appliance.tensors.inventory import TensorError, named
from appliance.tensors.packing import pack
from appliance.verdict import Outcome, Reason, Verdict, refused

STAGES: tuple[Stage, ...] = ("processed", "loaded")


@dataclass
class Weights:
    """A module whose weights are in place, the open connection that leases them, and how long each phase took."""

    module: torch.nn.Module
    configs: dict[str, bytes]
    verdict: Verdict
    record: ShardRecord
    client: KeeperClient | None
    phases_s: dict[str, float] = field(default_factory=dict)


def obtain(
    terms: Terms, source: Source, *, client_name: str, on_progress: Callable[[str], None] = lambda text: None
) -> Weights:
    """Return the module with its weights in place, in the way the terms allow.

    TrustError where the checkpoint on disk is not what was verified; MissError where the keeper has not got these
    weights and `on_miss` is `fail`; ResourceError where that may change soon. Never a private second copy.
    """
    deadline = time.monotonic() + terms.wait_s
    client = KeeperClient.connect(terms.socket_path, timeout_s=terms.wait_s)
    taker = _Taker(client, terms, source, client_name, on_progress)
    try:
        weights = taker.obtain(deadline)
    except BaseException:
        client.close()
        raise
    if terms.copy:
        # The engine owns a clone and the keeper may let go of its shard: there is nothing to lease.
        client.close()
        weights.client = None
    return weights


def load_and_donate(terms: Terms, source: Source, client: KeeperClient, *, client_name: str) -> Weights:
    """Fill this source's empty slot from disk; RefusedError where the keeper does not want that."""
    client.offer(role=source.role, rank=source.rank, client=client_name, target=terms.target(None))
    return _Taker(client, terms, source, client_name, client.progress).fill()


def fill(terms: Terms, source: Source, *, client_name: str) -> Weights:
    """Load and donate, as a loader does; where the slot is filled already, attach like an engine."""
    client = KeeperClient.connect(terms.socket_path, timeout_s=terms.wait_s)
    try:
        return load_and_donate(terms, source, client, client_name=client_name)
    except RefusedError as error:
        client.close()
        if error.verdict.reason is not Reason.OCCUPIED:
            raise _fatal(error.verdict, terms) from error
    except BaseException:
        client.close()
        raise
    return obtain(terms, source, client_name=client_name)


def fingerprint_of(target: Fingerprint, source: Source, files: Mapping[str, bytes], stage: str) -> Fingerprint:
    """Return every fact that shapes these weights: the target's, the engine's, and which shard of them it is."""
    shard = {"role": source.role, "rank": source.rank, "stage": stage}
    return Fingerprint.of({**target.to_json(), **source.facts(files), **shard})


@dataclass(frozen=True)
class _Taker:
    """One process that wants one shard, over one connection."""

    client: KeeperClient
    terms: Terms
    source: Source
    name: str
    on_progress: Callable[[str], None]

    def obtain(self, deadline: float) -> Weights:
        while True:
            try:
                return self._attach(deadline)
            except RefusedError as error:
                if not self._may_load(error.verdict, deadline):
                    raise _fatal(error.verdict, self.terms) from error
                replace = error.verdict.reason is Reason.FINGERPRINT_DIFFERS
            if weights := self._donate(replace=replace):
                return weights

    def fill(self) -> Weights:
        """Load, pack and donate to the slot that was granted."""
        *others, last = self.source.stages
        for stage in others:
            try:
                return self._donated(self.source.load(stage, self.on_progress), stage)
            except TensorError as error:
                # Nothing was donated; the next stage asks less of a module.
                event(f"the weights are not kept as {stage}: {error.message}", priority=WARNING)
            gc.collect()  # modules hold themselves in cycles, and there may be no room for two
        return self._donated(self.source.load(last, self.on_progress), last)

    def _attach(self, deadline: float) -> Weights:
        source, terms, client = self.source, self.terms, self.client
        began = time.monotonic()
        described = self._described(deadline)
        resident = time.monotonic()
        record = described.record
        with described.configs:
            files = configs.unpack(described.configs)
        try:
            terms.check_files(record, files)
        except TrustError as error:
            self._report(refused(Reason.FILE_DIFFERS, str(error)), {})
            raise
        checked = time.monotonic()
        stage = stage_of(record)
        fingerprint = fingerprint_of(terms.target(record), source, files, stage)
        configured = time.monotonic()
        slabs = client.attach(role=source.role, rank=source.rank, client=self.name, fingerprint=fingerprint)
        received = time.monotonic()
        try:
            module = source.skeleton(files)
        except BaseException:
            close_all(slabs)
            raise
        built = time.monotonic()
        try:
            awaited = self._bind(module, described.layout, record, slabs, stage)
        except PeerError as error:
            # The keeper checked none of this: it opens no device.
            self._report(refused(Reason.STALE_MEMORY, str(error)), {})
            raise ResourceError(
                f"what the keeper holds cannot be mapped: {error.message}",
                hint=f"was the GPU reset, or its driver restarted? {terms.unit} loads the weights again",
            ) from error
        bound = time.monotonic()
        module = self._finished(module, record, stage, awaited)
        phases = {
            "wait": resident - began,
            "check": checked - resident,
            "config": configured - checked,
            "skeleton": built - received,
            "attach": (received - configured) + (bound - built),
            "finish": time.monotonic() - bound,
        }
        verdict = Verdict(Outcome.HIT)
        self._report(verdict, phases)
        return Weights(module, files, verdict, record, client, phases)

    def _described(self, deadline: float) -> Description:
        loads = self.terms.on_miss == "load"
        # Who may load waits only for somebody else's load, not for one that nobody has started.
        wait_s = 0.0 if loads else max(deadline - time.monotonic(), 0.0)
        try:
            return self._describe(wait_s)
        except RefusedError as error:
            if not loads or error.verdict.reason is not Reason.LOADING:
                raise
        return self._describe(max(deadline - time.monotonic(), 0.0))

    def _describe(self, wait_s: float) -> Description:
        role, rank = self.source.role, self.source.rank
        return self.client.describe(role=role, rank=rank, wait_s=wait_s, on_progress=self.on_progress)

    def _donate(self, *, replace: bool) -> Weights | None:
        """Load and donate; None where somebody else came first, so that attaching is to be tried again."""
        source = self.source
        try:
            self.client.offer(
                role=source.role, rank=source.rank, client=self.name, target=self.terms.target(None), replace=replace
            )
        except RefusedError as error:
            if error.verdict.reason in (Reason.LOADING, Reason.OCCUPIED) and not replace:
                return None
            raise _fatal(error.verdict, self.terms) from error

        def tell(text: str) -> None:
            self.on_progress(text)
            self.client.progress(text)

        return _Taker(self.client, self.terms, source, self.name, tell).fill()

    def _donated(self, loaded: Loaded, stage: Stage) -> Weights:
        source, terms, client = self.source, self.terms, self.client
        target = terms.target(None)
        fingerprint = fingerprint_of(target, source, loaded.configs, stage)
        began = time.monotonic()
        self.on_progress("packing the weights")
        packed = pack(loaded.module, backend(source.device), opaque=source.opaque)
        packed_at = time.monotonic()
        layout, slab_sizes, slabs = packed.layout.encode(), packed.layout.slab_sizes, tuple(packed.slabs)
        try:
            checksums = slab_checksums(source.device, slabs, slab_sizes)
            phases = {**loaded.phases_s, "pack": packed_at - began, "checksum": time.monotonic() - packed_at}
            record = ShardRecord(
                shard_id=secrets.token_hex(8),
                role=source.role,
                rank=source.rank,
                device=source.device,
                fingerprint=fingerprint,
                target=target,
                signer=terms.signer,
                slab_sizes=slab_sizes,
                checksums=checksums,
                flags=loaded.flags,
                files={path: stat.to_json() for path, stat in loaded.files.items()},
                phases_s=phases,
            )
            # The donor goes on exactly as one who attaches does: over the sealed memory, not over what it loaded.
            self._bind(loaded.module, layout, record, slabs, stage, keep=True)
            if stage == "processed":
                self._prove(loaded, layout, record, slabs)
            with (
                memfd.sealed("record", [record.encode(layout)]) as held,
                configs.pack(loaded.configs) as packed_configs,
            ):
                client.donate(held, packed_configs, slabs)
        finally:
            close_all(slabs)
        module = loaded.module if stage == "processed" else source.finish(loaded.module, stage)
        verdict = Verdict(Outcome.DONATED)
        self._report(verdict, phases)
        return Weights(module, loaded.configs, verdict, record, client, phases)

    def _prove(self, loaded: Loaded, layout: bytes, record: ShardRecord, slabs: tuple[Descriptor, ...]) -> None:
        """Return if another process gets this very module from the shard; TensorError, naming what differs, if not."""
        self.on_progress("proving the processed weights")
        module = self.source.skeleton(loaded.configs)
        try:
            awaited = self._bind(module, layout, record, slabs, "processed", keep=True)
            module = self._finished(module, record, "processed", awaited)
        except PeerError as error:
            raise TensorError(error.message) from error
        if found := differences(loaded.module, module, opaque=self.source.opaque, unused=self.source.unused):
            raise TensorError(f"another process would get another module: {named(found)}")

    def _bind(
        self,
        module: torch.nn.Module,
        layout: bytes,
        record: ShardRecord,
        slabs: tuple[Descriptor, ...],
        stage: Stage,
        *,
        keep: bool = False,
    ) -> Awaited:
        """Attach the shard; its descriptors are closed unless they are to be kept."""
        device, sizes = backend(record.device), record.slab_sizes
        try:
            opaque = self.source.opaque
            awaited = bind(module, layout, device, slabs, sizes, copy=self.terms.copy, stage=stage, opaque=opaque)
            # Weights as they were loaded bring along no others: what has no place is refused now.
            inner = False if stage == "processed" else None
            set_flags(module, record.flags, inner=inner, objects=False, opaque=opaque)
            return awaited
        finally:
            if not keep:
                close_all(slabs)

    def _finished(
        self, module: torch.nn.Module, record: ShardRecord, stage: Stage, awaited: Awaited
    ) -> torch.nn.Module:
        module = self.source.finish(module, stage)
        if stage == "processed":
            # Now, as what is rebuilt of a module may ask its objects whether that was done, or get new ones.
            set_flags(module, record.flags, inner=True, opaque=self.source.opaque)
        confirm(module, awaited, opaque=self.source.opaque)
        return module

    def _report(self, verdict: Verdict, phases_s: dict[str, float]) -> None:
        # A keeper that went away changes nothing about what was found here; whoever has the lease notices.
        with contextlib.suppress(PeerError):
            self.client.report(verdict, phases_s)

    def _may_load(self, verdict: Verdict, deadline: float) -> bool:
        if self.terms.on_miss != "load" or time.monotonic() > deadline:
            return False
        return verdict.reason in (Reason.NOT_RESIDENT, Reason.LOADER_FAILED, Reason.FINGERPRINT_DIFFERS)


def stage_of(record: ShardRecord) -> Stage:
    """Return the stage at which a shard was taken; PeerError where it says none."""
    for stage in STAGES:
        if record.fingerprint.get("stage") == stage:
            return stage
    raise PeerError(f"a shard of stage {record.fingerprint.get('stage')[:40]!r}, which is none")


def _fatal(verdict: Verdict, terms: Terms) -> ApplianceError:
    unit = terms.unit
    match verdict.reason:
        case Reason.FINGERPRINT_DIFFERS | Reason.TARGET_DIFFERS:
            hint = terms.differing_hint or f"restart {unit} to load these"
            return MissError(f"the keeper holds other weights: {verdict}", hint=hint)
        case Reason.NOT_RESIDENT | Reason.LOADER_FAILED | Reason.CHECKPOINT_REFUSED:
            return MissError(f"no weights to attach: {verdict}", hint=f"see the messages of {unit}")
        case Reason.LOADING | Reason.LEASED | Reason.BUSY | Reason.OCCUPIED:
            return ResourceError(f"not now: {verdict}", hint="set a longer `wait`, or try again")
        case Reason.NOT_PERMITTED:
            return ConfigError(str(verdict), hint="the engine's user must be in the manifest's group")
        case _:
            return PeerError(str(verdict))
