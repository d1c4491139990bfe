"""The demo's own folder: a copy of the checkpoint it may damage, a key pair, a manifest, and what the units write."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import yaml

from appliance.checkpoint.keys import generate_key, load_private_key
from appliance.checkpoint.safetensors import read_header
from appliance.checkpoint.signature import sign
from appliance.errors import ConfigError, HostError
from appliance.ports import free_port

MODEL = "smollm2"
DAMAGED_TENSOR = "model.norm.weight"


@dataclass(frozen=True)
class Damage:
    """What was overwritten: a tensor's bytes in one file, its header left as it was."""

    file: Path
    tensor: str
    size_bytes: int


class Workplace:
    """Everything below one temporary folder, gone when it is closed."""

    def __init__(self, checkpoint: Path, **settings: object) -> None:
        """Copy the checkpoint; `settings` are further settings of the model."""
        self._settings_of_model = settings
        self.folder = Path(tempfile.mkdtemp(prefix="appliance-demo-"))
        self.checkpoint = self.folder / "checkpoint"
        self.manifest = self.folder / "appliance.yaml"
        self.port = free_port()
        self._key = self.folder / "signer.key"
        try:
            shutil.copytree(checkpoint, self.checkpoint)
            (self.folder / "trust").mkdir()
            generate_key(self._key, public_path=self.folder / "trust" / "demo.pub")
            self.manifest.write_text(yaml.safe_dump(self._settings(), sort_keys=False))
        except OSError as error:
            self.close()
            raise HostError(f"cannot prepare {self.folder}: {error.strerror}") from error

    def sign(self) -> None:
        """Sign the checkpoint as it is now."""
        sign(self.checkpoint, load_private_key(self._key))

    def zero_a_tensor(self) -> Damage:
        """Overwrite one tensor's values with zeros: same names, same shapes, same headers, another model."""
        for path in sorted(self.checkpoint.glob("*.safetensors")):
            with path.open("r+b") as file:
                header, _ = read_header(file.fileno(), what=path.name)
                for info in header.tensors:
                    if info.name == DAMAGED_TENSOR:
                        file.seek(info.begin)
                        file.write(bytes(info.size_bytes))
                        return Damage(path, info.name, info.size_bytes)
        raise ConfigError(f"{self.checkpoint}: has no tensor {DAMAGED_TENSOR}")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Workplace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settings(self) -> dict[str, object]:
        return {
            "group": None,
            "trust": {"policy": "signed", "keys": [str(self.folder / "trust")]},
            "directories": {name: str(self.folder / name) for name in ("runtime", "state", "cache")},
            "models": {
                MODEL: {
                    "checkpoint": str(self.checkpoint),
                    "engine": {"kind": "builtin", "port": self.port},
                    **self._settings_of_model,
                }
            },
        }
