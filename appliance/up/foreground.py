"""`appliance up`: a manifest's keepers and engines on this terminal until Ctrl-C."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest
from appliance.up import lock
from appliance.up.description import Event
from appliance.up.printer import LinePrinter, Printer
from appliance.up.supervisor import Supervisor
from appliance.up.units import checkpoints, units


async def run(path: Path, file: TextIO) -> int:
    """Supervise what the manifest names and return an exit status; ApplianceError where that cannot begin."""
    manifest = load_manifest(path)
    # A parent that ignores the ends of its children has taught us to lose their exit statuses.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    printer = Printer(file, names=[unit.name for unit in units(manifest, path)])
    try:
        return await supervisor(manifest, path, printer).run()
    finally:
        printer.close()


def supervisor(
    manifest: Manifest, path: Path, printer: LinePrinter, *, on_event: Callable[[Event], None] = lambda event: None
) -> Supervisor:
    """Return a supervisor of what the manifest names; HostError where this user cannot use its directories."""
    directories = manifest.directories
    lock.prepare(directories.runtime, directories.state, directories.cache)
    return Supervisor(
        units(manifest, path),
        printer,
        runtime=directories.runtime,
        checkpoints=checkpoints(manifest, path),
        on_event=on_event,
    )
