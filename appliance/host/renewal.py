"""`checkpoint@MODEL.service`: a replaced checkpoint is verified, unprivileged, before anything restarts on it.

`python -m appliance.host.renewal changed|verify|roll-out --manifest FILE --model NAME`. `changed` ends with 0 where the
checkpoint on disk is to be looked at (ExecCondition=), `verify` with 0 where all of it is as signed; `roll-out`, as
root, restarts the keeper and after it the engine. What is wrong is told to the keeper, which goes on serving.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from appliance.checkpoint.files import CheckpointRoot, find_root
from appliance.checkpoint.identity import check_stats, identify
from appliance.checkpoint.stat_record import FileStat
from appliance.checkpoint.verification import verify_all
from appliance.client import KeeperClient
from appliance.errors import ApplianceError, HostError, TrustError
from appliance.events import ERROR, NOTICE, WARNING, event
from appliance.host.seen import Seen
from appliance.host.systemctl import RELOAD_TIMEOUT_S, START_TIMEOUT_S, active_state, systemctl
from appliance.host.unit_files import unit_name
from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest
from appliance.notify import Notifier
from appliance.progress import in_words
from appliance.target import trust_of

UNCHANGED = 1
# A copy that is under way touches something at least this often.
SETTLED_S = 10.0
POLL_S = 1.0
# A keeper that was killed is back before that.
KEEPER_TIMEOUT_S = 10.0

Tell = Callable[[str], None]


def changed(manifest: Manifest, name: str, *, seen: Seen) -> bool:
    """Tell whether the checkpoint on disk is neither what the keeper has or loads, nor what was looked at before.

    What the keeper has is new, too, to an engine that failed on what was there, or was trusted, meanwhile.
    """
    now = seen.look(manifest, name)
    if now == seen.last():
        return False
    try:
        with KeeperClient.connect(manifest.socket_path(name), timeout_s=KEEPER_TIMEOUT_S) as client:
            if _is_loading(client, manifest, name):
                # Not remembered: what came of it is looked at when it is done.
                return False
            same = _is_the_keepers(client, manifest, name)
            if same:
                client.checkpoint_seen("")
        if not same or active_state(unit_name("engine", name)) == "failed":
            return True
    except ApplianceError:  # no keeper, or no signature to go by: `verify` finds out
        return True
    seen.save(now)
    return False


def verify(manifest: Manifest, name: str, *, seen: Seen, tell: Tell, settled_s: float = SETTLED_S) -> str:
    """Return the root digest once every file is as signed.

    ApplianceError, which the keeper is told, when it is not, and nothing has been written for `settled_s`.
    """
    while True:
        now = seen.look(manifest, name)
        try:
            identity = identify(manifest.model(name).checkpoint, trust_of(manifest))
            # Remembered: the keeper that restarts on it need not read it all again.
            verify_all(identity, manifest.directories.state, on_progress=lambda read: tell(in_words("verifying", read)))
        except ApplianceError as error:
            # An rsync in progress is not a broken checkpoint: wait until it has ended one way or the other.
            if (left_s := settled_s - _quiet_s(manifest.model(name).checkpoint)) > 0:
                tell(f"waiting for the copy to end: {error.message}")
                time.sleep(min(left_s, POLL_S))
                continue
            seen.save(now)
            _tell_keeper(manifest, name, str(error))
            raise
        if seen.look(manifest, name) == now:
            seen.save(now)
            event("checkpoint verified", priority=NOTICE, model=name, root_digest=identity.root_digest)
            return identity.root_digest


def roll_out(manifest: Manifest, name: str, *, tell: Tell) -> None:
    """Restart the keeper and then the engine on a verified checkpoint; leave alone what has it, or was stopped.

    TrustError where the keeper refuses it all the same, HostError where a unit does not start.
    """
    weights, engine = unit_name("weights", name), unit_name("engine", name)
    wanted = identify(manifest.model(name).checkpoint, trust_of(manifest)).root_digest
    if active_state(weights) == "inactive":
        return
    if _resident(manifest, name) != wanted:
        _restart(weights, tell)
        if (resident := _resident(manifest, name)) != wanted:
            raise TrustError(f"{weights} holds {resident or 'nothing'}, not the new checkpoint {wanted}")
        if active_state(engine) != "inactive":
            _restart(engine, tell)
    elif active_state(engine) == "failed":
        _restart(engine, tell)


def _is_loading(client: KeeperClient, manifest: Manifest, name: str) -> bool:
    """Tell whether the keeper is reading these files: it begins with the checkpoint that is there when it starts."""
    wanted = identify(manifest.model(name).checkpoint, trust_of(manifest)).root_digest
    status = client.status()
    return status.get("root_digest") != wanted == status.get("target_root_digest") and not status.get("refused")


def _is_the_keepers(client: KeeperClient, manifest: Manifest, name: str) -> bool:
    """Tell whether these files are those that the keeper has read."""
    identity = identify(manifest.model(name).checkpoint, trust_of(manifest))
    if client.status().get("root_digest") != identity.root_digest:
        return False
    described = client.describe(role="target", rank=0, wait_s=0)
    described.configs.close()
    recorded = {path: FileStat.from_json(facts) for path, facts in described.record.files.items()}
    return not check_stats(identity, recorded)


def _resident(manifest: Manifest, name: str) -> str:
    try:
        with KeeperClient.connect(manifest.socket_path(name)) as client:
            status = client.status()
            if status.get("refused"):
                client.checkpoint_seen("")
            return str(status.get("root_digest", ""))
    except ApplianceError:
        return ""


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
