"""Commands that make this host as the manifest says, under systemd."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.options import MANIFEST, JsonOption, ManifestOption, ModelArgument
from appliance.host import doctor as doctors
from appliance.host import restart as restarts
from appliance.host.applied import running
from appliance.host.apply import apply as carry_out
from appliance.host.apply import write_files
from appliance.host.plan import Change, Plan, make_plan
from appliance.host.presence import require_present
from appliance.host.unit_files import wanted_files
from appliance.host.unit_text import Files
from appliance.manifest.load import load_manifest, load_manifest_file

DIFFERS = 1

RootOption = Annotated[Path, typer.Option("--root", help="the host's root directory", hidden=True)]


def plan(
    manifest: ManifestOption = MANIFEST,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 where the host differs")] = False,
    root: RootOption = Path("/"),
) -> None:
    """Show what `apply` would change: the diff of each file, what restarts, and why."""
    found = make_plan(_wanted(manifest, here=root == Path("/")), root)
    _show(found, diffs=True)
    if check and found:
        raise typer.Exit(DIFFERS)


def apply(manifest: ManifestOption = MANIFEST) -> None:
    """Make the host as the manifest says: all files or none, then start, restart and stop exactly what changed."""
    found = make_plan(_wanted(manifest, here=True), Path("/"))
    _show(found, diffs=False)
    if found:
        carry_out(found, Path("/"), tell=lambda text: print(text, flush=True))


def generate(
    folder: Annotated[Path, typer.Argument(help="where the files go, as below a host's root")],
    manifest: ManifestOption = MANIFEST,
) -> None:
    """Write the same files into a folder, for images and review. Starts nothing."""
    wanted = _wanted(manifest, here=False)
    write_files([Change(path, None, content) for path, content in wanted.items()], folder)
    for path in sorted(wanted):
        print(folder / path)


def restart(model: ModelArgument, manifest: ManifestOption = MANIFEST, as_json: JsonOption = False) -> None:
    """Restart a model's engine, and check that it came back attached and says what it said before."""
    # The unit goes by what was applied, on the port that was applied.
    parsed = load_manifest(running(manifest))
    timeline = restarts.restart(parsed, model, tell=lambda text: print(text, file=sys.stderr))
    if as_json:
        print(json.dumps(vars(timeline), indent=2))
        return
    for step, seconds in timeline.steps_s.items():
        print(f"{seconds:8.3f} s  {step}")
    for phase, seconds in timeline.phases_s.items():
        print(f"{seconds:8.3f} s    {phase}")
    print(f"verdict: {timeline.verdict}; canary: {timeline.canary}")


def doctor(manifest: ManifestOption = MANIFEST, as_json: JsonOption = False) -> None:
    """Look at this host with the appliance's eyes; every finding comes with its fix. Exits with 1 on a failure."""
    findings = doctors.examine(manifest)
    if as_json:
        print(json.dumps([finding.to_json() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(finding)
    if any(finding.level is doctors.Level.FAIL for finding in findings):
        raise typer.Exit(DIFFERS)


def _wanted(path: Path, *, here: bool) -> Files:
    """Return the files of a manifest; where they are for this host, only if it has what the manifest names."""
    file = load_manifest_file(path)
    if here:
        require_present(file)
    return wanted_files(file.manifest, path)


def _show(found: Plan, *, diffs: bool) -> None:
    if not found:
        print("nothing to do: the host is as the manifest says")
        return
    for change in found.changes if diffs else ():
        print(change.diff())
    for action in found.actions if diffs else ():
        print(action)
