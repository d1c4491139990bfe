"""The part of `appliance status` that says who holds each GPU's memory."""

from typing import Any

from rich.table import Table

from appliance.quantities import format_size


def gpu_table(gpus: list[dict[str, Any]]) -> Table:
    """Return a table of what `tenants.Tenancy.to_json` says of each GPU."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("GPU", "FREE", "TOTAL", "KEPT", "ENGINES", "LOADERS", "STRANGERS", "OTHER"):
        table.add_column(column, overflow="fold")
    for gpu in gpus:
        kept = ", ".join(f"{model} {format_size(size)}" for model, size in gpu["kept_bytes"].items())
        table.add_row(
            f"{gpu['index']} ({gpu['model']})",
            format_size(gpu["free_bytes"]),
            format_size(gpu["total_bytes"]),
            kept or "-",
            _tenants(gpu["engines"]),
            _tenants(gpu["loaders"]),
            _tenants(gpu["strangers"]),
            _size(gpu["other_bytes"]),
        )
    return table


def _tenants(tenants: list[dict[str, Any]]) -> str:
    shown = (f"{tenant['name']} (pid {tenant['pid']}) {_size(tenant['used_bytes'])}".lstrip() for tenant in tenants)
    return ", ".join(shown) or "-"


def _size(size_bytes: int | None) -> str:
    return "?" if size_bytes is None else format_size(size_bytes)
