"""The built-in engine's way to weights: what transformers makes of a checkpoint, attached or donated."""

import hashlib
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import torch

from appliance import configs
from appliance.client import KeeperClient
from appliance.engine import disk
from appliance.engine.configs import load_config
from appliance.engine.device import RANK, device_of
from appliance.engine.model import skeleton
from appliance.handover import weights
from appliance.handover.device import device_facts
from appliance.handover.source import Loaded
from appliance.handover.terms import terms_of
from appliance.handover.weights import Weights
from appliance.target import TARGET, Target
from appliance.tensors.homes import Stage


def obtain(target: Target, *, client_name: str, on_progress: Callable[[str], None] = lambda text: None) -> Weights:
    """Return the model with its weights in place; refuses what `appliance.handover.weights.obtain` refuses."""
    with tempfile.TemporaryDirectory(prefix="appliance-configs-") as folder:
        source = BuiltinSource(target, Path(folder))
        return weights.obtain(terms_of(target), source, client_name=client_name, on_progress=on_progress)


def load_and_donate(target: Target, client: KeeperClient, *, client_name: str) -> Weights:
    """Fill this model's empty slot from disk; RefusedError where the keeper does not want that."""
    with tempfile.TemporaryDirectory(prefix="appliance-configs-") as folder:
        source = BuiltinSource(target, Path(folder))
        return weights.load_and_donate(terms_of(target), source, client, client_name=client_name)


class BuiltinSource:
    """One model's weights as transformers makes them; configs are unpacked below `folder` for as long as it is used."""

    role: Final = TARGET
    rank: Final = RANK
    stages: tuple[Stage, ...] = ("loaded",)  # transformers has nothing left to do to the weights once they are loaded
    opaque: Collection[type] = ()
    unused: Collection[str] = ()

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._folder = folder
        self._unpacked: tuple[Mapping[str, bytes], Path] | None = None
        self.device = device_of(target)

    def facts(self, configs: Mapping[str, bytes]) -> Mapping[str, object]:
        config = load_config(self._folder_of(configs), dtype=self._target.model.dtype)
        return {
            **device_facts(self.device),
            "model.architecture": ",".join(config.architectures or ()),
            "model.type": config.model_type,
            "model.dtype": str(config.dtype).removeprefix("torch."),
            "config.sha256": hashlib.sha256(configs["config.json"]).hexdigest(),
        }

    def skeleton(self, configs: Mapping[str, bytes]) -> torch.nn.Module:
        return skeleton(self._folder_of(configs), dtype=self._target.model.dtype)

    def load(self, stage: Stage, on_progress: Callable[[str], None]) -> Loaded:
        return disk.load_verified(self._target, on_progress=on_progress)

    def finish(self, module: torch.nn.Module, stage: Stage) -> torch.nn.Module:
        return module

    def _folder_of(self, files: Mapping[str, bytes]) -> Path:
        if self._unpacked is None or self._unpacked[0] is not files:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            configs.write(files, folder)
            self._unpacked = (files, folder)
        return self._unpacked[1]
