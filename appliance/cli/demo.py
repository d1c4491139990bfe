"""`appliance demo`: the main job on a real small model, on this machine, as this user."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from appliance.cli.options import JsonOption
from appliance.quantities import format_size

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "appliance"


def demo(
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="leave out what the processes say")] = False,
    cache: Annotated[Path, typer.Option("--cache", help="where the model is kept for the next time")] = DEFAULT_CACHE,
) -> None:
    """Serve a real model, restart its engine, kill its keeper, tamper with its checkpoint, and show what happens."""
    from appliance.demo.model import obtain
    from appliance.demo.story import play
    from appliance.demo.workplace import Workplace
    from appliance.up.printer import Printer

    console = Console(stderr=True, highlight=False)
    checkpoint = obtain(cache, on_progress=lambda text: console.print(text, markup=False))
    with Workplace(checkpoint) as workplace, Path(os.devnull).open("w") as nowhere:
        printer = Printer(nowhere if quiet else sys.stderr, names=["weights@smollm2", "engine@smollm2"])
        try:
            tell = lambda text: console.print(text, style="bold", markup=False)  # noqa: E731
            found = asyncio.run(play(workplace, printer=printer, tell=tell))
        finally:
            printer.close()
    result = summary(found.to_json())
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        Console().print(_table(result))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return what was seen, with the four figures of the table."""
    cold, warm = found["seconds"]["cold start"], found["seconds"]["warm restart"]
    figures = {
        "cold_start_s": cold,
        "warm_restart_s": warm,
        "attach_s": found["phases_s"]["warm restart"]["attach"],
        "saved_s": cold - warm,
    }
    return {"figures": figures, **found}


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{format_size(result['size_bytes'])} of weights, {result['root_digests'][0][:19]}")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    figures = result["figures"]
    table.add_row("cold start: keeper loads and verifies from disk, engine attaches", f"{figures['cold_start_s']:.2f}")
    table.add_row("warm restart: engine only", f"{figures['warm_restart_s']:.2f}")
    table.add_row("  of it, attaching the weights", f"{figures['attach_s']:.4f}")
    table.add_row("saved by a warm restart", f"{figures['saved_s']:.2f}")
    return table
