"""`checkpoint@MODEL.service`: a replaced checkpoint is verified, unprivileged, before anything restarts on it.

`python -m appliance.host.renewal changed|verify --manifest FILE --model NAME`. `changed` ends with 0 where the
checkpoint on disk is not the resident one (ExecCondition=), `verify` with 0 where all of it is as signed. What is wrong
is told to the keeper, which goes on serving.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from appliance.checkpoint.files import CheckpointRoot, find_root
from appliance.checkpoint.findings import check_all
from appliance.checkpoint.identity import identify
from appliance.client import KeeperClient
from appliance.errors import ApplianceError, TrustError
from appliance.events import ERROR, event
from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest
from appliance.notify import Notifier
from appliance.progress import in_words
from appliance.target import trust_of

UNCHANGED = 1
# A copy that is under way touches something at least this often.
SETTLED_S = 20.0
POLL_S = 1.0


def changed(manifest: Manifest, name: str) -> bool:
    """Tell whether the checkpoint on disk is another one than the keeper holds, or than it has been told about."""
    checkpoint = manifest.model(name).checkpoint
    status = _keeper_status(manifest, name)
    try:
        root_digest = identify(checkpoint, trust_of(manifest)).root_digest
    except ApplianceError:
        return True
    same = root_digest == status.get("root_digest")
    if same and status.get("refused"):
        _tell_keeper(manifest, name, "")
    return not same


def verify(manifest: Manifest, name: str, *, notifier: Notifier) -> None:
    """Return once every file is as signed; TrustError when it is not and nothing has been written for a while."""
    model = manifest.model(name)
    root = find_root(model.checkpoint)
    while True:
        try:
            identity = identify(root, trust_of(manifest))
            check_all(identity, on_progress=lambda read: notifier.status(in_words("verifying", read))).require_none(
                identity
            )
        except TrustError as error:
            # An rsync in progress is not a broken checkpoint: wait until it has ended one way or the other.
            if (age_s := time.time() - _last_write(root)) < SETTLED_S:
                notifier.status(f"waiting for the copy to end: {error.message}")
                time.sleep(max(min(SETTLED_S - age_s, SETTLED_S), POLL_S))
                continue
            _tell_keeper(manifest, name, str(error))
            raise
        event(f"new checkpoint verified: {identity.root_digest}", model=name, root_digest=identity.root_digest)
        return


def _last_write(root: CheckpointRoot) -> float:
    """Return when something in the checkpoint was last written, created or renamed, in seconds since the epoch."""
    latest = root.path.stat().st_ctime
    for folder, _, files in os.walk(root.path):
        latest = max(latest, os.stat(folder).st_ctime)  # noqa: PTH116
        for file in files:
            try:
                latest = max(latest, Path(folder, file).stat().st_ctime)
            except FileNotFoundError:
                return time.time()
    return latest


def _keeper_status(manifest: Manifest, name: str) -> dict[str, object]:
    try:
        with KeeperClient.connect(manifest.socket_path(name)) as client:
            return client.status()
    except ApplianceError:  # nothing is resident: whatever is on disk is new
        return {}


def _tell_keeper(manifest: Manifest, name: str, refusal: str) -> None:
    try:
        with KeeperClient.connect(manifest.socket_path(name)) as client:
            client.checkpoint_seen(refusal)
    except ApplianceError as error:
        event(f"the keeper could not be told: {error}", model=name)


def main() -> int:
    """Return the exit status that the unit acts on."""
    parser = argparse.ArgumentParser(prog="appliance renewal", description=__doc__)
    parser.add_argument("step", choices=("changed", "verify"))
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    try:
        manifest = load_manifest(arguments.manifest)
        if arguments.step == "changed":
            return 0 if changed(manifest, arguments.model) else UNCHANGED
        verify(manifest, arguments.model, notifier=Notifier(os.environ))
    except ApplianceError as error:
        event(
            f"appliance: {error}",
            priority=ERROR,
            model=arguments.model,
            verdict="refused",
            reason="checkpoint_refused",
        )
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
