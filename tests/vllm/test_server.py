"""The engine's unit where the engine is vLLM: a real `appliance.engine`, a keeper, PID 1's socket, and a fake vLLM."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import EXIT_CONFIG, EXIT_MISS, EXIT_TRUST
from appliance.keeper.settings import Slot
from appliance.ports import free_port
from appliance.vllm.outcome import Outcome
from tests.engine.checkpoints import make_checkpoint
from tests.keeper.serving import Serving
from tests.service_manager import ServiceManager
from tests.sites import MODEL, Site

TIMEOUT_S = 60.0
FAKE = Path(__file__).with_name("fake_server.py")
# The engine starts what `sys.executable` names, with -m and vLLM's module ahead of the arguments.
ENGINE = "import sys; sys.executable = sys.argv.pop(1); from appliance.engine.__main__ import main; sys.exit(main())"


class Engine:
    """A place with an empty keeper whose engine may load, so that a fake vLLM has nothing to attach."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder = folder / "fake"
        self.folder.mkdir()
        program = self.folder / "python"
        program.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -I {FAKE} "$@"\n')
        program.chmod(0o755)
        self.program = program
        self.port = free_port()
        self.site = Site(folder / "site", checkpoint, on_miss="load", engine=self.settings())

    def settings(self, *arguments: str, **environment: str) -> dict[str, Any]:
        return {
            "kind": "vllm",
            "port": self.port,
            "args": list(arguments),
            "environment": {"FAKE_FOLDER": str(self.folder), **environment},
        }

    def write(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    @contextmanager
    def running(self, manager: ServiceManager, **environ: str) -> Iterator["subprocess.Popen[str]"]:
        argv = [sys.executable, "-c", ENGINE, str(self.program), "--manifest", str(self.site.manifest)]
        target = self.site.target()
        target.socket_path.parent.mkdir(parents=True, exist_ok=True)
        with Serving(target.socket_path.parent, layout=[Slot("target", 0, "cpu")], target=target.fingerprint):
            process = subprocess.Popen(
                [*argv, "--model", MODEL],
                env={**os.environ, **manager.environ, **environ},
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=TIMEOUT_S)

    def ended(self, manager: ServiceManager) -> tuple[int, str]:
        """Run one that ends by itself; return its status and what it said."""
        with self.running(manager) as process:
            _, said = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, said

    @property
    def started(self) -> dict[str, Any]:
        told = json.loads((self.folder / "started").read_text())
        assert isinstance(told, dict)
        return told


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("server") / "checkpoint")


@pytest.fixture
def engine(tmp_path: Path, checkpoint: Path) -> Engine:
    return Engine(tmp_path, checkpoint)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as manager:
        yield manager


def is_ready(manager: ServiceManager) -> bool:
    return manager_heard(manager, "READY=1") == 1


def manager_heard(manager: ServiceManager, line: str) -> int:
    return sum(line in datagram.lines for datagram in manager.datagrams)


def test_it_is_ready_once_vllm_is_healthy_and_has_answered(engine: Engine, manager: ServiceManager) -> None:
    engine.write("sick")
    engine.write("outcome", json.dumps(asdict(Outcome("target", 0, verdict="hit", stage="loaded"))))
    with engine.running(manager) as process:
        manager.wait_for_line("STATUS=vLLM is starting")
        assert not is_ready(manager)
        (engine.folder / "sick").unlink()
        manager.wait_for(is_ready)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert f"STATUS=hit: serving m on 127.0.0.1:{engine.port}" in {line for told in manager.said() for line in told}
    assert "weights: hit (loaded, 1 ranks)" in said
    assert (engine.folder / "stopped").read_text() == str(int(signal.SIGTERM))
    assert manager.heard("STOPPING=1")


def test_vllm_is_started_on_the_configs_and_links_to_the_weights(engine: Engine, manager: ServiceManager) -> None:
    with engine.running(manager):
        manager.wait_for(is_ready)
    arguments, environment = engine.started["arguments"], engine.started["environment"]
    configs = Path(arguments[0])
    assert configs.is_relative_to(engine.site.folder / "state")
    assert (configs / "config.json").read_bytes() == (engine.site.checkpoint / "config.json").read_bytes()
    weights = {path.name for path in engine.site.checkpoint.glob("*.safetensors")}
    assert weights
    assert {path.name for path in configs.glob("*.safetensors") if path.is_symlink()} == weights, "links, no copies"
    assert arguments[arguments.index("--load-format") + 1] == "appliance"
    assert arguments[arguments.index("--shutdown-timeout") + 1] == "40"
    assert environment["APPLIANCE_MODEL"] == MODEL
    assert int(environment["APPLIANCE_STARTER"]) == engine.started["parent"]
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & environment.keys()


@pytest.mark.parametrize(
    "told",
    [
        ["--shutdown-timeout", "7", "--api-server-count", "4"],
        ["--shutdown-timeout=7", "--api-server-count=4"],
        ["--shutdown_timeout", "7", "--api_server_count=4"],
    ],
    ids=["words", "equals", "underscores"],
)
def test_what_the_manifest_says_of_both_decides(engine: Engine, manager: ServiceManager, told: list[str]) -> None:
    engine.site.write(parallel={"data": 2}, engine=engine.settings(*told))
    with engine.running(manager):
        manager.wait_for(is_ready)
    parser = argparse.ArgumentParser()
    # As vLLM's own parser takes them, which turns underscores into dashes first.
    parser.add_argument("--shutdown-timeout", "--shutdown_timeout")
    parser.add_argument("--api-server-count", "--api_server_count")
    decided, _ = parser.parse_known_args(engine.started["arguments"])
    assert (decided.shutdown_timeout, decided.api_server_count) == ("7", "4")


def test_replicas_share_one_server_which_lets_their_answers_end(engine: Engine, manager: ServiceManager) -> None:
    engine.site.write(parallel={"data": 2})
    with engine.running(manager):
        manager.wait_for(is_ready)
    arguments = engine.started["arguments"]
    assert arguments[arguments.index("--api-server-count") + 1] == "1"


def test_its_exit_status_is_passed_on(engine: Engine, manager: ServiceManager) -> None:
    engine.write("exit", "3")
    assert engine.ended(manager)[0] == 3
    assert not is_ready(manager)


def test_one_that_dies_of_the_first_question_never_was_ready(engine: Engine, manager: ServiceManager) -> None:
    engine.write("dies", "7")
    assert engine.ended(manager)[0] == 7
    assert not is_ready(manager)


def test_what_a_worker_found_goes_before_an_exit_status_of_vllm(engine: Engine, manager: ServiceManager) -> None:
    outcome = Outcome("target", 0, verdict="refused", error="m.safetensors differs", exit_status=EXIT_TRUST)
    engine.write("outcome", json.dumps(asdict(outcome)))
    engine.write("exit", "1")
    status, said = engine.ended(manager)
    assert (status, "m.safetensors differs" in said) == (EXIT_TRUST, True)
    assert "verdict=refused reason=not_trusted" in said


def test_what_the_keeper_refused_to_a_worker_is_told_with_its_reason(engine: Engine, manager: ServiceManager) -> None:
    outcome = Outcome("target", 0, verdict="refused", reason="not_resident", error="no weights", exit_status=EXIT_MISS)
    engine.write("outcome", json.dumps(asdict(outcome)))
    engine.write("exit", "1")
    status, said = engine.ended(manager)
    assert (status, "verdict=refused reason=not_resident" in said) == (EXIT_MISS, True), said


def test_weights_that_no_worker_asked_for_are_not_served(engine: Engine, manager: ServiceManager) -> None:
    engine.write("unasked")
    status, said = engine.ended(manager)
    assert (status, "did not ask the keeper for" in said) == (EXIT_CONFIG, True)
    assert not is_ready(manager)


def test_one_that_ends_by_the_signal_that_stops_it_ended_well(engine: Engine, manager: ServiceManager) -> None:
    engine.write("exit-stopped", "9")
    with engine.running(manager) as process:
        manager.wait_for(is_ready)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 9


def test_a_vllm_that_was_killed_is_told_as_a_shell_does(engine: Engine, manager: ServiceManager) -> None:
    with engine.running(manager) as process:
        manager.wait_for(is_ready)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGKILL


def test_the_watchdog_is_fed_while_it_is_healthy_and_no_longer(engine: Engine, manager: ServiceManager) -> None:
    with engine.running(manager, WATCHDOG_USEC="300000"):
        manager.wait_for(lambda manager: manager_heard(manager, "WATCHDOG=1") > 1)
        engine.write("sick")
        asked = engine.folder / "asked-while-sick"
        # Two refusals: whatever was fed because of an earlier answer has arrived after the first.
        wait_for_size(asked, 2)
        fed = manager_heard(manager, "WATCHDOG=1")
        wait_for_size(asked, 6)
        assert manager_heard(manager, "WATCHDOG=1") == fed


def wait_for_size(file: Path, size_bytes: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not file.exists() or file.stat().st_size < size_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("arguments", [["--api-key", "secret"], ["--api-key=secret"]])
def test_the_first_question_is_asked_with_the_key(
    engine: Engine, manager: ServiceManager, arguments: list[str]
) -> None:
    engine.site.write(engine=engine.settings(*arguments, FAKE_KEY="secret"))
    with engine.running(manager) as process:
        manager.wait_for(is_ready)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert "no canary" not in said


def test_one_that_completes_nothing_is_ready_without_a_canary(engine: Engine, manager: ServiceManager) -> None:
    engine.write("embeds")
    with engine.running(manager) as process:
        manager.wait_for(is_ready)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert "no canary for m" in said


def test_a_changed_config_is_refused_before_it_starts(engine: Engine, manager: ServiceManager) -> None:
    path = engine.site.checkpoint / "config.json"
    path.write_text(path.read_text() + " ")
    status, said = engine.ended(manager)
    assert (status, "config.json" in said) == (EXIT_TRUST, True)
    assert not (engine.folder / "started").exists()
