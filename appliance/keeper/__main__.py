"""`python -m appliance.keeper --manifest FILE --model NAME`: what `weights@NAME.service` runs."""

import argparse
import asyncio
import contextlib
import os
import resource
import sys
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.events import ERROR, event
from appliance.keeper.keeper import Keeper
from appliance.notify import Notifier, take_listen_descriptors

# Between the service manager and this process alone: a child must not speak for it.
_OWN_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE")


def main() -> int:
    """Run one keeper; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m appliance.keeper", description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    given = take_listen_descriptors(os.environ)
    with contextlib.closing(Notifier(os.environ)) as notifier:
        for name in _OWN_VARIABLES:
            os.environ.pop(name, None)
        _allow_every_descriptor()
        try:
            asyncio.run(Keeper(arguments.manifest, arguments.model, notifier=notifier).run(given))
        except ApplianceError as error:
            event(f"appliance: {error}", priority=ERROR, model=arguments.model)
            return error.exit_status
    return 0


def _allow_every_descriptor() -> None:
    # A shard has up to 250 of them, and what is on its way to clients counts too.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
