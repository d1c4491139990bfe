"""`appliance status`: what every keeper of the manifest holds, for whom, and how it got there."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from appliance.cli.gpus import gpu_table
from appliance.cli.options import MANIFEST, JsonOption, ManifestOption
from appliance.client import KeeperClient
from appliance.errors import ApplianceError, ConfigError
from appliance.gpus import gpu_states
from appliance.host.applied import running
from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest
from appliance.quantities import format_phases, format_size
from appliance.tenants import tenancies

DIGEST_CHARS = 12
WATCH_INTERVAL_S = 1.0


def status(
    manifest: ManifestOption = MANIFEST,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="show it again every second")] = False,
) -> None:
    """Show what is held, which checkpoint it is, who signed it, and who has it attached."""
    path = running(manifest)
    parsed = load_manifest(path)
    trouble = None if path == manifest else _edited(manifest, parsed)
    if watch:
        with Live(_view(gather(parsed)), console=Console(), screen=True) as live:
            while True:
                time.sleep(WATCH_INTERVAL_S)
                live.update(_view(gather(parsed)))
    _show(parsed, as_json=as_json)
    if trouble is not None:
        raise typer.Exit(trouble.exit_status)


def _edited(manifest: Path, applied: Manifest) -> ConfigError | None:
    """Tell of edits that nothing goes by yet; return what is wrong with them, which hides nothing of what runs."""
    try:
        differs = load_manifest(manifest) != applied
    except ConfigError as error:
        print(f"appliance: {error}\nwhat runs, as it was applied before:", file=sys.stderr, flush=True)
        return error
    if differs:
        print(f"{manifest} was edited since it was applied: see `appliance plan`", file=sys.stderr, flush=True)
    return None


def _show(manifest: Manifest, *, as_json: bool) -> None:
    found = gather(manifest)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(_view(found))


def gather(manifest: Manifest) -> dict[str, Any]:
    """Return each model's status as its keeper tells it; a keeper that does not answer is part of the picture.

    Also who holds each GPU's memory; where NVML does not answer, `gpus` is None and `gpus_unknown` says why.
    """
    models = {name: _ask(manifest.socket_path(name)) for name in manifest.models}
    try:
        gpus = [tenancy.to_json() for tenancy in tenancies(gpu_states(), models)]
    except ApplianceError as error:
        return {"models": models, "gpus": None, "gpus_unknown": error.message}
    return {"models": models, "gpus": gpus, "gpus_unknown": ""}


def _ask(path: Path) -> dict[str, Any]:
    try:
        with KeeperClient.connect(path) as client:
            return client.status()
    except ApplianceError as error:
        return {"state": "down", "trouble": error.message, "shards": [], "leases": [], "verdicts": [], "size_bytes": 0}


def _view(status: dict[str, Any]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("MODEL", "STATE", "HELD", "ROOT DIGEST", "SIGNER", "ATTACHED"):
        table.add_column(column, overflow="fold")
    notes = []
    for name, model in status["models"].items():
        attached = ", ".join(f"{lease['client']} (pid {lease['pid']}, {lease['verdict']})" for lease in model["leases"])
        table.add_row(
            name,
            model["state"] + (" (checkpoint refused)" if model.get("refused") else ""),
            format_size(model["size_bytes"]),
            model.get("root_digest", "")[:DIGEST_CHARS],
            model.get("signer", ""),
            attached or "-",
        )
        notes += [f"{name}: {line}" for line in _notes(model)]
    return Group(table, *notes, *([gpu_table(status["gpus"])] if status["gpus"] else []))


def _notes(model: dict[str, Any]) -> Iterator[str]:
    if text := model.get("progress") or model.get("trouble"):
        yield text
    for shard in model["shards"]:
        yield f"{shard['role']} rank {shard['rank']} on {shard['device']}: {_phases(shard['phases_s'])}"
    for lease in model["leases"]:
        if lease["phases_s"]:
            yield f"{lease['client']}: {_phases(lease['phases_s'])}"
    for verdict in model["verdicts"]:
        if verdict["verdict"] == "refused":
            fields = "; ".join(f"{name}: wanted {wanted}, held {held}" for name, wanted, held in verdict["fields"])
            yield f"refused {verdict['client']}: {verdict['reason']} {verdict['detail']} {fields}".rstrip()


def _phases(phases_s: dict[str, float]) -> str:
    return format_phases(phases_s) or "no timings"
