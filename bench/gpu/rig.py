"""One model's keeper, and what its processes are told: shards of random weights instead of a checkpoint's."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.client import KeeperClient
from appliance.errors import ApplianceError
from appliance.fingerprint import Fingerprint
from bench.gpu.device import REPOSITORY, environment

ROLE = "target"


@dataclass(frozen=True)
class Rig:
    """A folder with the keeper's settings and socket, and how large each GPU's shard is."""

    folder: Path
    devices: tuple[str, ...]
    tensors: int
    size_bytes: int
    slab_bytes: int | None = None
    python: str = sys.executable

    @property
    def settings_path(self) -> Path:
        return self.folder / "settings.json"

    @property
    def socket_path(self) -> Path:
        return self.folder / "run" / "keeper.sock"

    def donated_path(self, rank: int) -> Path:
        """What the last donor of this rank left: the checksums of its slabs, and how it went."""
        return self.folder / f"donated-{rank}.json"

    @property
    def target(self) -> Fingerprint:
        return Fingerprint.of(
            {"root_digest": "0" * 64, "gpus": ",".join(self.devices), "bench": f"{self.tensors}x{self.size_bytes}"}
        )

    def fingerprint(self, rank: int) -> Fingerprint:
        return Fingerprint.of(self.target.to_json() | {"role": ROLE, "rank": rank})

    def write(self, *, loader: Sequence[str] | None = None) -> None:
        """Write the settings; the keeper runs `loader`, by default the bench's donor, to get its shards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rig_path = self.folder / "rig.json"
        rig_path.write_text(json.dumps(asdict(self) | {"folder": str(self.folder)}))
        settings = {
            "model": "bench",
            "runtime": str(self.socket_path.parent),
            "gid": None,
            "health": None,
            "slots": [{"role": ROLE, "rank": rank, "device": device} for rank, device in enumerate(self.devices)],
            "signer": "bench",
            "target": self.target.to_json(),
            "refusal": None,
            "loader": list(loader or (self.python, "-m", "bench.gpu.donor", str(rig_path))),
        }
        self.settings_path.write_text(json.dumps(settings))

    @property
    def keeper_argv(self) -> tuple[str, ...]:
        return self.python, "-m", "bench.gpu.keeper", str(self.settings_path)

    def engine_argv(self, *options: str) -> tuple[str, ...]:
        return self.python, "-m", "bench.gpu.engine", str(self.folder / "rig.json"), *options

    def donor_argv(self) -> tuple[str, ...]:
        return self.python, "-m", "bench.gpu.donor", str(self.folder / "rig.json")

    def status(self) -> dict[str, Any] | None:
        """Return what the keeper says of itself; None where none answers."""
        try:
            with KeeperClient.connect(self.socket_path) as client:
                return client.status()
        except ApplianceError:
            return None

    def wait_resident(self, *, timeout_s: float) -> dict[str, Any]:
        """Return the keeper's status once every shard is resident; TimeoutError with the last one else."""
        return self.wait_for(lambda status: status["state"] == "resident", timeout_s=timeout_s)

    def wait_for(self, wanted: Any, *, timeout_s: float) -> dict[str, Any]:
        """Return the first status that is wanted."""
        deadline = time.monotonic() + timeout_s
        status = None
        while time.monotonic() < deadline:
            status = self.status() or status
            if status is not None and wanted(status):
                return status
            time.sleep(0.02)
        raise TimeoutError(f"the keeper is not there after {timeout_s:g} s: {status}\n{self.log()}")

    def donated(self, rank: int) -> dict[str, Any]:
        """Return what the last donor of this rank left."""
        result: dict[str, Any] = json.loads(self.donated_path(rank).read_text())
        return result

    def log(self) -> str:
        """Return the end of what the processes said."""
        path = self.folder / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""


def read_rig(path: Path) -> Rig:
    """Return the rig that `Rig.write` described."""
    fields = json.loads(path.read_text())
    return Rig(**fields | {"folder": Path(fields["folder"]), "devices": tuple(fields["devices"])})


@contextlib.contextmanager
def running_keeper(rig: Rig) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the keeper as a plain process: nobody keeps its descriptors but itself."""
    with started(rig, rig.keeper_argv) as process:
        yield process


@contextlib.contextmanager
def started(rig: Rig, argv: Sequence[str], *, stdout: int | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program of the bench until the block ends; what it says goes to the rig's log."""
    with (rig.folder / "log").open("ab") as log:
        process = subprocess.Popen(
            argv,
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log if stdout is None else stdout,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]", *, number: int = signal.SIGTERM, timeout_s: float = 20.0) -> None:
    """End a program that `started` runs, and its children."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
