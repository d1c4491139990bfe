"""`checkpoint@MODEL.service`: a replaced checkpoint is verified, unprivileged, before anything restarts on it.

A model's checkpoint is all that its weights come from: a draft may have a folder of its own.

`python -m appliance.host.renewal changed|verify|roll-out --manifest FILE --model NAME`. `changed` ends with 0 where the
checkpoint on disk is to be looked at (ExecCondition=), `verify` with 0 where all of it is as signed; `roll-out`, as
root, restarts the keeper and after it the engine. What is wrong is told to the keeper, which goes on serving.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from appliance.checkpoint.files import CheckpointRoot, find_root
from appliance.checkpoint.identity import Identity, check_stats, identify
from appliance.checkpoint.stat_record import FileStat
from appliance.checkpoint.verification import verify_all
from appliance.client import KeeperClient
from appliance.errors import ApplianceError, HostError, TrustError
from appliance.events import ERROR, NOTICE, WARNING, event
from appliance.fingerprint import DRAFT_ROOT_DIGEST
from appliance.host.seen import Seen
from appliance.host.systemctl import RELOAD_TIMEOUT_S, START_TIMEOUT_S, active_state, systemctl
from appliance.host.unit_files import unit_name
from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest
from appliance.notify import Notifier
from appliance.progress import in_words
from appliance.record import ShardRecord
from appliance.target import DRAFT, TARGET, draft_identity, trust_of

UNCHANGED = 1
# A copy that is under way touches something at least this often.
SETTLED_S = 10.0
POLL_S = 1.0
# A keeper that was killed is back before that.
KEEPER_TIMEOUT_S = 10.0

Tell = Callable[[str], None]

# Root digests of the model's checkpoint and of the draft's own, if it has one, by the role of their weights.
Digests = dict[str, str]


def changed(manifest: Manifest, name: str, *, seen: Seen) -> bool:
    """Tell whether the checkpoint on disk is neither what the keeper has or loads, nor what was looked at before.

    What the keeper has is new, too, to an engine that failed on what was there, or was trusted, meanwhile.
    """
    now = seen.look(manifest, name)
    if now == seen.last():
        return False
    try:
        with KeeperClient.connect(manifest.socket_path(name), timeout_s=KEEPER_TIMEOUT_S) as client:
            identities = _identities(manifest, name)
            if _is_loading(client, identities):
                # Not remembered: what came of it is looked at when it is done.
                return False
            same = _is_the_keepers(client, identities)
            if same:
                client.checkpoint_seen("")
        if not same or active_state(unit_name("engine", name)) == "failed":
            return True
    except ApplianceError:  # no keeper, or no signature to go by: `verify` finds out
        return True
    seen.save(now)
    return False


def verify(manifest: Manifest, name: str, *, seen: Seen, tell: Tell, settled_s: float = SETTLED_S) -> str:
    """Return the model's root digest once every file is as signed, the draft's too.

    ApplianceError, which the keeper is told, when it is not, and nothing has been written for `settled_s`.
    """
    while True:
        now = seen.look(manifest, name)
        try:
            identities = _identities(manifest, name)
            for identity in identities.values():
                # Remembered: the keeper that restarts on it need not read it all again.
                verify_all(
                    identity, manifest.directories.state, on_progress=lambda read: tell(in_words("verifying", read))
                )
        except ApplianceError as error:
            # An rsync in progress is not a broken checkpoint: wait until it has ended one way or the other.
            if (left_s := settled_s - min(map(_quiet_s, manifest.model(name).checkpoints))) > 0:
                tell(f"waiting for the copy to end: {error.message}")
                time.sleep(min(left_s, POLL_S))
                continue
            seen.save(now)
            _tell_keeper(manifest, name, str(error))
            raise
        if seen.look(manifest, name) == now:
            seen.save(now)
            root_digest = identities[TARGET].root_digest
            event("checkpoint verified", priority=NOTICE, model=name, root_digest=root_digest)
            return root_digest


def roll_out(manifest: Manifest, name: str, *, tell: Tell) -> None:
    """Restart the keeper and then the engine on a verified checkpoint; leave alone what has it, or was stopped.

    TrustError where the keeper refuses it all the same, HostError where a unit does not start.
    """
    weights, engine = unit_name("weights", name), unit_name("engine", name)
    wanted = _digests(_identities(manifest, name))
    if active_state(weights) == "inactive":
        return
    if _resident(manifest, name, roles=wanted) != wanted:
        _restart(weights, tell)
        if (resident := _resident(manifest, name, roles=wanted)) != wanted:
            held, new = (" ".join(digests.values()).strip() for digests in (resident, wanted))
            raise TrustError(f"{weights} holds {held or 'nothing'}, not the new checkpoint {new}")
        if active_state(engine) != "inactive":
            _restart(engine, tell)
    elif active_state(engine) == "failed":
        _restart(engine, tell)


def _identities(manifest: Manifest, name: str) -> dict[str, Identity]:
    """Return what the checkpoints on disk are, by the role of the weights that lie in them."""
    model, trust = manifest.model(name), trust_of(manifest)
    draft = draft_identity(model, trust)
    return {TARGET: identify(model.checkpoint, trust)} | ({} if draft is None else {DRAFT: draft})


def _digests(identities: Mapping[str, Identity]) -> Digests:
    return {role: identity.root_digest for role, identity in identities.items()}


def _is_loading(client: KeeperClient, identities: Mapping[str, Identity]) -> bool:
    """Tell whether the keeper is reading these files: it begins with the checkpoint that is there when it starts."""
    wanted, status = identities[TARGET].root_digest, client.status()
    return status.get("root_digest") != wanted == status.get("target_root_digest") and not status.get("refused")


def _is_the_keepers(client: KeeperClient, identities: Mapping[str, Identity]) -> bool:
    """Tell whether these files are those that the keeper has read."""
    if _held(client, roles=identities) != _digests(identities):
        return False
    for role, identity in identities.items():
        recorded = {path: FileStat.from_json(facts) for path, facts in _record(client, role).files.items()}
        if check_stats(identity, recorded):
            return False
    return True


def _held(client: KeeperClient, *, roles: Container[str]) -> Digests:
    """Return what the keeper's weights were read from, of these roles; empty where it has none."""
    root_digest = str(client.status().get("root_digest", ""))
    if not root_digest:
        return {}
    if DRAFT not in roles:
        return {TARGET: root_digest}
    return {TARGET: root_digest, DRAFT: _record(client, TARGET).target.to_json().get(DRAFT_ROOT_DIGEST, "")}


def _record(client: KeeperClient, role: str) -> ShardRecord:
    """Return the record of one of a role's shards: of a pipeline's stages only the last one speculates."""
    ranks = (shard["rank"] for shard in client.status().get("shards", ()) if shard["role"] == role)
    described = client.describe(role=role, rank=next(ranks, 0), wait_s=0)
    described.configs.close()
    return described.record


def _resident(manifest: Manifest, name: str, *, roles: Container[str]) -> Digests:
    try:
        with KeeperClient.connect(manifest.socket_path(name)) as client:
            if client.status().get("refused"):
                client.checkpoint_seen("")
            return _held(client, roles=roles)
    except ApplianceError:
        return {}


def _restart(unit: str, tell: Tell) -> None:
    tell(f"restarting {unit}")
    if active_state(unit) == "failed":
        systemctl("reset-failed", unit, timeout_s=RELOAD_TIMEOUT_S)
    try:
        systemctl("restart", unit, timeout_s=START_TIMEOUT_S)
    except ApplianceError as error:
        raise HostError(f"{unit} does not start on the new checkpoint: {error.message}", hint=error.hint) from error


def _quiet_s(checkpoint: Path) -> float:
    """Return for how long nothing in the checkpoint has been written, created or renamed, in seconds."""
    try:
        return time.time() - _last_write(find_root(checkpoint))
    except ApplianceError:  # it is not there, which no copy does to it
        return SETTLED_S


def _last_write(root: CheckpointRoot) -> float:
    latest = root.path.stat().st_ctime
    for folder, _, files in os.walk(root.path):
        try:
            latest = max([latest, *(Path(folder, file).lstat().st_ctime for file in ("", *files))])
        except FileNotFoundError:  # replaced at this moment
            return time.time()
    return latest


def _tell_keeper(manifest: Manifest, name: str, refusal: str) -> None:
    try:
        with KeeperClient.connect(manifest.socket_path(name)) as client:
            client.checkpoint_seen(refusal)
    except ApplianceError as error:
        event(f"the keeper could not be told: {error}", priority=WARNING, model=name)


def main() -> int:
    """Return the exit status that the unit acts on."""
    parser = argparse.ArgumentParser(prog="appliance renewal", description=__doc__)
    parser.add_argument("step", choices=("changed", "verify", "roll-out"))
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    seen = Seen(Path(os.environ.get("RUNTIME_DIRECTORY", "/run"), "seen"))
    notifier = Notifier(os.environ)
    try:
        manifest = load_manifest(arguments.manifest)
        match arguments.step:
            case "changed":
                return 0 if changed(manifest, arguments.model, seen=seen) else UNCHANGED
            case "verify":
                verify(manifest, arguments.model, seen=seen, tell=notifier.status)
            case _:
                roll_out(manifest, arguments.model, tell=notifier.status)
    except ApplianceError as error:
        event(
            f"appliance: {error}",
            priority=ERROR,
            model=arguments.model,
            verdict="refused",
            reason="checkpoint_refused",
        )
        notifier.status(error.message)
        return error.exit_status
    finally:
        notifier.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
