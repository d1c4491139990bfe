"""A place whose keeper, loader and engine are processes with a real vLLM."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.ports import free_port
from tests.keeper.process import KeeperProcess
from tests.service_manager import ServiceManager
from tests.sites import MODEL, Site
from tests.vllm import vllm_process

ARGUMENTS = ("--max-model-len", "256", "--enforce-eager")
# Imports alone take five seconds for each of its processes, on a machine that has nothing else to do.
START_TIMEOUT_S = 240.0


class VllmSite(Site):
    def __init__(self, folder: Path, checkpoint: Path, *, arguments: tuple[str, ...] = ARGUMENTS, **more: Any) -> None:
        self.port = free_port()
        settings = {"args": list(arguments), "environment": vllm_process.ENGINE_SETTINGS}
        engine = {"kind": "vllm", "port": self.port, **settings}
        super().__init__(folder, checkpoint, engine=engine, **{"wait": START_TIMEOUT_S, **more})

    @property
    def python(self) -> str:
        return vllm_process.vllm_python()

    @property
    def environment(self) -> dict[str, str]:
        return vllm_process.environment()

    def wait_until_resident(self, *, ranks: int = 1) -> None:
        """Return once every rank's slot holds this checkpoint as it is now, and the loader has ended."""
        root_digest, deadline = self.target().identity.root_digest, time.monotonic() + START_TIMEOUT_S
        while not all(self._holds(rank, root_digest) for rank in range(ranks)):
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.1)
        self._wait_for_loaders_end()

    def _holds(self, rank: int, root_digest: str) -> bool:
        # What was given back stays until it is known whether it is still wanted.
        with self.client() as client:
            described = client.describe(role="target", rank=rank, wait_s=START_TIMEOUT_S)
            described.configs.close()
        return described.record.fingerprint.root_digest == root_digest

    @contextmanager
    def kept(self, manager: ServiceManager) -> Iterator[KeeperProcess]:
        """Run a keeper that is given what the service manager has of it."""
        with KeeperProcess(
            self.manifest,
            given=manager.handed_over(),
            environ={**self.environment, **manager.environ},
            python=self.python,
        ) as keeper:
            yield keeper

    @contextmanager
    def engine(self) -> Iterator["Engine"]:
        """Run `python -m appliance.engine`; it is killed if the block did not end it."""
        argv = ("-m", "appliance.engine", "--manifest", str(self.manifest), "--model", MODEL)
        log = self.folder / "engine.log"
        with log.open("w") as file:
            process = vllm_process.start(*argv, stderr=subprocess.PIPE, stdout=file)
        try:
            yield Engine(process, log)
        finally:
            process.kill()
            process.communicate()


class Engine:
    """One engine process; what it and vLLM print goes to a log, what it says of itself is read here."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self._log = log
        self._said: list[str] = []

    def wait_for_line(self, text: str) -> str:
        """Return the next line of its standard error that has this in it; AssertionError if it ends before."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}: {self.said}")

    @property
    def said(self) -> str:
        return "".join(self._said[-40:]) + self._log.read_text(errors="replace")[-2000:]

    def processes(self) -> list[int]:
        """Return the ids of all that it started, and of what these started."""
        found, parents = list[int](), [self.process.pid]
        while parents:
            tasks = Path(f"/proc/{parents.pop()}/task").glob("*/children")
            children = [int(pid) for path in tasks for pid in path.read_text().split()]
            found += children
            parents += children
        return found

    def ended(self) -> tuple[int, str]:
        """Wait for its end; return its status and what it said."""
        assert self.process.stderr is not None
        self._said += self.process.stderr.readlines()
        return self.process.wait(), "".join(self._said)

    def stop(self) -> int:
        """End it as systemd would; return its status."""
        self.process.terminate()
        return self.ended()[0]
