"""`python -m appliance.keeper --manifest FILE --model NAME`: what `weights@NAME.service` runs."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.events import ERROR, event
from appliance.keeper.keeper import Keeper
from appliance.notify import Notifier, take_listen_descriptors


def main() -> int:
    """Run one keeper; return its exit status."""
    parser = argparse.ArgumentParser(prog="appliance keeper", description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    given = take_listen_descriptors(os.environ)  # type: ignore[arg-type]
    keeper = Keeper(arguments.manifest, arguments.model, notifier=Notifier(os.environ))
    try:
        asyncio.run(keeper.run(given))
    except ApplianceError as error:
        event(f"appliance: {error}", priority=ERROR, model=arguments.model)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
