"""A place where a model is served: a signed checkpoint, keys, a manifest, and real keepers started by hand."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from appliance.checkpoint.keys import generate_key, load_private_key
from appliance.checkpoint.safetensors import read_header
from appliance.checkpoint.signature import sign
from appliance.client import KeeperClient
from appliance.target import Target, read_target

MODEL = "m"
WAIT_S = 60.0


class Site:
    """Everything below one folder; its checkpoint is a copy that a test may damage."""

    def __init__(
        self, folder: Path, checkpoint: Path, *, copy: Callable[[str, str], object] = shutil.copy2, **settings: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.manifest = folder / "appliance.yaml"
        self.settings: dict[str, Any] = {"engine": {"port": 18000}, "wait": WAIT_S, **settings}
        shutil.copytree(checkpoint, self.checkpoint, copy_function=copy)
        (folder / "trust").mkdir()
        generate_key(folder / "signer.key", public_path=folder / "trust" / "signer.pub")
        self.policy = "signed"
        self.write()
        self.sign()

    def sign(self) -> None:
        """Sign the checkpoint, and that of its draft where it has one."""
        key = load_private_key(self.folder / "signer.key")
        sign(self.checkpoint, key)
        draft = self.settings.get("draft") or {}
        if "checkpoint" in draft:
            sign(Path(draft["checkpoint"]), key)

    def write(self, **settings: Any) -> None:
        """Write the manifest, with some settings of the model changed."""
        self.settings |= settings
        manifest = {
            "group": None,
            "trust": {"policy": self.policy, "keys": [str(self.folder / "trust")]},
            "directories": {name: str(self.folder / name) for name in ("runtime", "state", "cache")},
            "models": {MODEL: {"checkpoint": str(self.checkpoint), **self.settings}},
        }
        self.manifest.write_text(yaml.safe_dump(manifest))

    def target(self) -> Target:
        return read_target(self.manifest, MODEL)

    def client(self) -> KeeperClient:
        return KeeperClient.connect(self.folder / "runtime" / MODEL / "keeper.sock", timeout_s=WAIT_S)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()

    def zero(self, tensor: str) -> Path:
        """Overwrite a tensor with zeros, leaving every header as it was; return its file."""
        for path in sorted(self.checkpoint.glob("*.safetensors")):
            with path.open("r+b") as file:
                for info in read_header(file.fileno(), what=path.name)[0].tensors:
                    if info.name == tensor:
                        file.seek(info.begin)
                        file.write(bytes(info.size_bytes))
                        return path
        raise AssertionError(f"no tensor {tensor}")

    @contextmanager
    def keeper(self, *, until_resident: bool = True) -> Iterator["subprocess.Popen[str]"]:
        """Run a keeper, without a service manager, until the block ends."""
        process = self.start_keeper()
        try:
            if until_resident:
                with self.client() as client:
                    client.describe(role="target", rank=0, wait_s=WAIT_S).configs.close()
                self._wait_for_loaders_end()
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WAIT_S)

    def _wait_for_loaders_end(self) -> None:
        """The loader has its shard leased until it has exited."""
        deadline = time.monotonic() + WAIT_S
        while self.status()["leases"]:
            assert time.monotonic() < deadline, "the loader does not end"
            time.sleep(0.01)

    @property
    def python(self) -> str:
        """The Python that runs the processes of this place."""
        return sys.executable

    @property
    def environment(self) -> dict[str, str]:
        """What they find in their environment."""
        return dict(os.environ)

    def start_keeper(self, **popen: Any) -> "subprocess.Popen[str]":
        argv = [self.python, "-m", "appliance.keeper", "--manifest", str(self.manifest), "--model", MODEL]
        environment = {name: value for name, value in self.environment.items() if name != "NOTIFY_SOCKET"}
        return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment, **popen)

    def call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of the operator with this manifest, and return how it ended."""
        argv = [self.python, "-m", "appliance", *arguments, "--manifest", str(self.manifest)]
        return subprocess.run(
            argv, check=False, capture_output=True, text=True, timeout=2 * WAIT_S, env=self.environment
        )
