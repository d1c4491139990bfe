import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.errors import ConfigError, HostError
from appliance.up import foreground
from appliance.up.description import UnitDescription
from tests.up.stage import TIMEOUT_S, described, puppet, until_file

MANIFEST = """
models:
  chat:
    checkpoint: {0}/checkpoint
    engine: {{port: 8001}}
directories: {{runtime: {0}/run, state: {0}/state, cache: {0}/cache}}
group: null
"""


@pytest.fixture
def manifest(folder: Path) -> Path:
    path = folder / "appliance.yaml"
    path.write_text(MANIFEST.format(folder))
    (folder / "checkpoint").mkdir()
    return path


def replace_programs(monkeypatch: pytest.MonkeyPatch, *units: UnitDescription) -> None:
    monkeypatch.setattr(foreground, "units", lambda manifest, path: units)


def test_a_manifest_runs_until_ctrl_c_with_all_that_was_said_on_the_terminal(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = manifest.parent / "seen"
    replace_programs(monkeypatch, described("weights@chat", "say loading", "ready", f"report {seen}", "wait"))
    screen = io.StringIO()

    async def scenario() -> int:
        running = asyncio.create_task(foreground.run(manifest, screen))
        await until_file(seen)
        os.kill(os.getpid(), signal.SIGINT)
        return await asyncio.wait_for(running, TIMEOUT_S)

    assert asyncio.run(scenario()) == 0
    lines = [line.split(" | ") for line in screen.getvalue().splitlines()]
    assert ["weights@chat", "loading"] in lines
    assert lines[-1] == ["up          ", "weights@chat: inactive"]
    assert (manifest.parent / "run").is_dir() and (manifest.parent / "state").is_dir()


def test_the_last_word_of_what_cannot_be_cured_is_on_the_terminal(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_programs(monkeypatch, described("weights@chat", "complain model.sig: unknown key", "exit 77"))
    screen = io.StringIO()
    assert asyncio.run(asyncio.wait_for(foreground.run(manifest, screen), TIMEOUT_S)) == 77
    assert screen.getvalue().splitlines()[-1].endswith("which no restart can cure: model.sig: unknown key")


MAIN = """
import asyncio, sys
from pathlib import Path
from appliance.up import foreground
from appliance.up.description import UnitDescription
unit = UnitDescription("weights@chat", tuple(sys.argv[2:]))
foreground.units = lambda manifest, path: (unit,)
sys.exit(asyncio.run(foreground.run(Path(sys.argv[1]), sys.stdout)))
"""


def test_a_terminal_that_takes_nothing_stops_neither_the_units_nor_the_end(manifest: Path) -> None:
    flooding = puppet("ready", "flood 15000", f"report {manifest.parent}/seen", "wait")
    process = subprocess.Popen([sys.executable, "-c", MAIN, str(manifest), *flooding], stdout=subprocess.PIPE)
    try:
        # Much more than the pipe and the queue hold together: all of it was taken, by somebody.
        asyncio.run(asyncio.wait_for(until_file(manifest.parent / "seen"), TIMEOUT_S))
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_directories_that_cannot_be_used_are_refused_before_anything_starts(manifest: Path) -> None:
    (manifest.parent / "run").touch()
    with pytest.raises(HostError, match="/run: cannot be made"):
        asyncio.run(foreground.run(manifest, io.StringIO()))


def test_a_broken_manifest_starts_nothing(manifest: Path) -> None:
    manifest.write_text("models: 3")
    with pytest.raises(ConfigError):
        asyncio.run(foreground.run(manifest, io.StringIO()))
    assert not (manifest.parent / "run").exists()


def test_supervising_needs_neither_torch_nor_an_engine() -> None:
    code = "import sys, appliance.up.foreground; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=TIMEOUT_S)
    assert done.stdout == b"[]\n"
