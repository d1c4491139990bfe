"""From the manifest to the units that serve it: `weights@MODEL` keeps, `engine@MODEL` serves."""

import sys
from pathlib import Path

from appliance.errors import ConfigError
from appliance.manifest.schema import Manifest, Model
from appliance.up.description import Checkpoint, UnitDescription

# One descriptor for each slab, two beside each shard: far more than any layout makes.
STORE_LIMIT = 4096

# A keeper asks for more while it loads.
_WEIGHTS_START_S = 300.0
_WEIGHTS_WATCHDOG_S = 60.0
_WEIGHTS_STOP_S = 30.0
_ENGINE_STOP_S = 60.0
# Imports, compilation and graphs; waiting for weights comes on top.
_ENGINE_START_S = 900.0


def units(manifest: Manifest, path: Path) -> tuple[UnitDescription, ...]:
    """Return keeper and engine of each model, keepers first; `path` is the manifest's own file.

    ConfigError for an engine that only a container can run.
    """
    for name, model in manifest.models.items():
        if model.engine.runtime != "native":
            raise ConfigError(
                f"{path}: models.{name}.engine.runtime: `appliance up` runs no containers",
                hint="use `runtime: native` here, and containers under systemd",
            )
    keepers = [_weights(name, path) for name in manifest.models]
    return (*keepers, *(_engine(name, model, path) for name, model in manifest.models.items()))


def checkpoints(manifest: Manifest, path: Path) -> tuple[Checkpoint, ...]:
    """Return what may be replaced while it is served. Without signatures nothing says that a new one is complete."""
    if manifest.trust.policy != "signed":
        return ()
    return tuple(
        Checkpoint(
            model=name,
            directories=model.checkpoints,
            verify=(*_program("appliance.target", path, name), "--verify"),
            restart=(f"weights@{name}", f"engine@{name}"),
        )
        for name, model in manifest.models.items()
    )


def _weights(name: str, path: Path) -> UnitDescription:
    return UnitDescription(
        name=f"weights@{name}",
        argv=_program("appliance.keeper", path, name),
        environment={"PYTHONUNBUFFERED": "1"},
        start_timeout_s=_WEIGHTS_START_S,
        stop_timeout_s=_WEIGHTS_STOP_S,
        watchdog_s=_WEIGHTS_WATCHDOG_S,
        store_limit=STORE_LIMIT,
    )


def _engine(name: str, model: Model, path: Path) -> UnitDescription:
    return UnitDescription(
        name=f"engine@{name}",
        argv=_program("appliance.engine", path, name),
        environment={"PYTHONUNBUFFERED": "1", **model.engine.thread_environment, **model.engine.environment},
        needs=(f"weights@{name}",),
        cpus=tuple(sorted(model.engine.cpus)),
        start_timeout_s=model.wait_s + _ENGINE_START_S,
        stop_timeout_s=_ENGINE_STOP_S,
    )


def _program(module: str, path: Path, name: str) -> tuple[str, ...]:
    return sys.executable, "-m", module, "--manifest", str(path.absolute()), "--model", name
