"""`appliance`: the one command of the operator. The only place that turns a failure into an exit status."""

import os
import sys
from typing import Annotated

import typer

from appliance import __version__
from appliance.cli import checkpoint, demo, host, manifest, parity, status, up, weights
from appliance.errors import ApplianceError
from appliance.manifest.problem import ManifestError

INTERRUPTED = 130

app = typer.Typer(
    name="appliance",
    help="Keep LLM weights resident across engine restarts, and prove they are the weights asked for.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"appliance {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print it")] = False,
) -> None:
    """Hold what every command shares."""


app.command("check")(manifest.check)
app.command("schema")(manifest.schema)
app.command("keygen")(checkpoint.keygen)
app.command("sign")(checkpoint.sign)
app.command("verify")(checkpoint.verify)
app.command("digest")(checkpoint.digest)
app.command("pin")(checkpoint.pin)
app.command("plan")(host.plan)
app.command("apply")(host.apply)
app.command("generate")(host.generate)
app.command("restart")(host.restart)
app.command("doctor")(host.doctor)
app.command("up")(up.up)
app.command("status")(status.status)
app.command("evict")(weights.evict)
app.command("scrub")(weights.scrub)
app.command("parity")(parity.parity)
app.command("demo")(demo.demo)


def main() -> None:
    """Run the command line and end the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status; a bug keeps its traceback and gives 1."""
    try:
        app(arguments)
    except SystemExit as end:  # typer has said what was wrong with the words of the call
        return end.code if isinstance(end.code, int) else 1
    except ApplianceError as error:
        # A manifest's errors begin with their places, each on a line of its own, as editors look for them.
        print(error if isinstance(error, ManifestError) else f"appliance: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `appliance status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0
