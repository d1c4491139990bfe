"""What one process wants of a keeper, and what it may do where the keeper has not got it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance.checkpoint.contents import check_configs
from appliance.checkpoint.findings import check_all
from appliance.checkpoint.identity import check_files, check_stats
from appliance.checkpoint.stat_record import FileStat
from appliance.fingerprint import DRAFT_ROOT_DIGEST, ROOT_DIGEST, Fingerprint
from appliance.record import ShardRecord
from appliance.target import TARGET, Target

CheckFiles = Callable[[ShardRecord, Mapping[str, bytes]], None]


@dataclass(frozen=True)
class Terms:
    """Where the keeper listens, how long to wait for it, and what to do on a miss.

    `check_files` compares the checkpoint on disk with what a shard was made of, and raises TrustError. `target` is what
    the keeper should hold, given the shard it describes or, to donate, none; `signer` is who vouches for that.
    `differing_hint` says what to do where the keeper holds other weights, if that is not to restart it.
    """

    socket_path: Path
    unit: str
    wait_s: float
    on_miss: Literal["fail", "load"]
    copy: bool
    check_files: CheckFiles
    target: Callable[[ShardRecord | None], Fingerprint]
    signer: str
    differing_hint: str | None = None


def terms_of(target: Target, *, role: str = TARGET) -> Terms:
    """Return the terms that a manifest sets for the weights of a role."""
    return Terms(
        socket_path=target.socket_path,
        unit=f"weights@{target.name}",
        wait_s=target.model.wait_s,
        on_miss=target.model.on_miss,
        copy=target.model.mode == "copy",
        check_files=lambda record, configs: _check_files(target, role, record, configs),
        target=lambda record: target.fingerprint,
        signer=target.identity_of(role).signer,
    )


def _check_files(target: Target, role: str, record: ShardRecord, configs: Mapping[str, bytes]) -> None:
    """Compare the checkpoint on disk with what was verified when this shard was loaded, as far as `verify` says.

    Where the shard is of another checkpoint there is nothing to compare: the fingerprints will differ.
    """
    identity = target.identity_of(role)
    own_fact = ROOT_DIGEST if identity is target.identity else DRAFT_ROOT_DIGEST
    if record.fingerprint.get(own_fact) != identity.root_digest:
        return
    if target.model.verify == "full":
        check_all(identity).require_none(identity)
    elif target.model.verify == "stat":
        recorded = {path: FileStat.from_json(facts) for path, facts in record.files.items()}
        # A file that was only touched is hashed, and good; the record keeps its old stat until the next load.
        check_files(identity, check_stats(identity, recorded))
    check_configs(identity.manifest, configs)
