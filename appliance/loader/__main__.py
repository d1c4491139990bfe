"""`python -m appliance.loader --manifest FILE --model NAME`: what a keeper runs to fill its slots."""

import argparse
import sys
import tempfile
from pathlib import Path

from appliance.client import KeeperClient, RefusedError
from appliance.descriptors import make_room
from appliance.errors import ApplianceError
from appliance.events import ERROR, event
from appliance.lifeline import end_with_parent
from appliance.target import read_target
from appliance.verdict import Reason

CONNECT_TIMEOUT_S = 30.0


def main() -> int:
    """Load, donate, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m appliance.loader", description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    # Without its keeper a loader fills memory that nobody will ever get.
    end_with_parent()
    make_room()
    try:
        return _load(arguments.manifest, arguments.model)
    except ApplianceError as error:
        event(f"appliance: {error}", priority=ERROR, model=arguments.model)
        return error.exit_status


def _load(manifest: Path, model: str) -> int:
    target = read_target(manifest, model)
    if target.model.engine.kind == "vllm":
        from appliance.vllm.loading import load_all

        with tempfile.TemporaryDirectory(prefix="appliance-outcomes-") as outcomes:
            load_all(target, manifest, Path(outcomes))
        return 0
    with KeeperClient.connect(target.socket_path, timeout_s=CONNECT_TIMEOUT_S) as client:
        # A second or two of imports; what cannot be trusted has been refused before them.
        from appliance.engine.device import show_only_own
        from appliance.engine.weights import load_and_donate

        show_only_own(target)
        try:
            weights = load_and_donate(target, client, client_name=f"loader@{model}")
        except RefusedError as error:
            if error.verdict.reason is not Reason.OCCUPIED:
                raise
            return 0
    event(
        f"loaded {weights.record.size_bytes} bytes in {weights.phases_s['load']:.2f} s",
        model=model,
        root_digest=weights.record.fingerprint.root_digest,
        signer=weights.record.signer,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
