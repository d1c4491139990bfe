"""The settings of the manifest, their types, defaults and descriptions. Frozen; an unknown setting is refused.

What two settings may not say together is in checks.py, and what a backend cannot do in capabilities.py: build a
Manifest through load.py, or only the single values have been looked at.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from appliance.errors import ConfigError
from appliance.manifest.values import (
    AbsolutePath,
    Count,
    Cpus,
    EnvironmentName,
    Gpu,
    Host,
    Image,
    ModelName,
    Port,
    Seconds,
    Text,
    Word,
)

# Thread pools that would otherwise each start one thread for every core of the host.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")

# Ways to speculate without a model, in vLLM's words.
GUESSING_METHODS = frozenset({"ngram", "ngram_gpu", "suffix"})

DEFAULT_PATH = Path("/etc/appliance/appliance.yaml")


class Settings(BaseModel):
    """What all groups of settings share."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)


class Parallel(Settings):
    """How a model is spread over ranks."""

    tensor: Count = Field(default=1, description="ranks that share each layer")
    pipeline: Count = Field(default=1, description="stages that the layers are divided into")
    data: Count = Field(default=1, description="replicas")
    expert: Count = Field(default=1, description="ranks that the experts of a mixture are divided over")

    @property
    def world_size(self) -> int:
        """Ranks in all; experts are divided over ranks that exist already."""
        return self.tensor * self.pipeline * self.data


class Draft(Settings):
    """The small model that speculates ahead of the large one."""

    checkpoint: AbsolutePath | None = Field(
        default=None, description="its folder; left out if the weights are in the model's own"
    )
    revision: Text | None = Field(
        default=None, description="name of the checkpoint's version, shown and part of the fingerprint"
    )
    method: Text | None = Field(
        default=None, description="how it speculates, in the engine's words", examples=["eagle3"]
    )
    tokens: Count | None = Field(default=None, description="tokens it runs ahead", examples=[3])

    @property
    def has_weights(self) -> bool:
        """Whether there is a model to load; some methods guess from the prompt alone."""
        return self.checkpoint is not None or (self.method is not None and self.method not in GUESSING_METHODS)


class Engine(Settings):
    """The inference server."""

    kind: Literal["builtin", "vllm"] = Field(default="builtin", description="which server")
    runtime: Literal["native", "podman"] = Field(default="native", description="process of the host, or container")
    image: Image | None = Field(
        default=None,
        description="container image, for runtime: podman",
        examples=["localhost/appliance-engine:latest"],
    )
    host: Host = Field(default="127.0.0.1", description="address it listens on")
    port: Port = Field(description="port it listens on", examples=[8001])
    args: tuple[Word, ...] = Field(default=(), description="further arguments, passed on as they are")
    environment: Mapping[EnvironmentName, Word] = Field(default={}, description="further environment variables")
    threads: Count | None = Field(default=None, description="threads that compute; left out, the engine decides")
    cpus: Cpus = Field(default=(), description='CPUs it may run on, like "0-3,8"; left out, all')

    @property
    def base_url(self) -> str:
        """Return where the engine is asked from its own host: whoever listens everywhere listens here."""
        here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host)  # noqa: S104
        return f"http://{here or (f'[{self.host}]' if ':' in self.host else self.host)}:{self.port}"

    @property
    def thread_environment(self) -> dict[str, str]:
        """Return the environment variables that say how many threads compute; none where the engine decides."""
        return {} if self.threads is None else dict.fromkeys(THREAD_VARIABLES, str(self.threads))


class Health(Settings):
    """Where the keeper tells whether the weights are resident, and its metrics."""

    host: Host = Field(default="127.0.0.1", description="address it listens on")
    port: Port | None = Field(
        default=None, description="port it listens on; left out, there is no such endpoint", examples=[9001]
    )


class Model(Settings):
    """One model: its checkpoint, how its weights are kept, and the engine that serves it."""

    checkpoint: AbsolutePath = Field(
        description="folder of safetensors files; a relative path starts at the manifest's folder",
        examples=["/srv/models/support-bot"],
    )
    revision: Text | None = Field(
        default=None, description="name of the checkpoint's version, shown and part of the fingerprint"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="type of the weights in memory; auto is what the checkpoint says"
    )
    quantization: Text | None = Field(
        default=None, description="method, in the engine's words; left out, what the checkpoint says"
    )
    parallel: Parallel = Field(default=Parallel(), description="how it is spread over ranks")
    gpus: tuple[Gpu, ...] = Field(default=(), description="GPUs by index or UUID, one for each rank; empty is the CPU")
    mode: Literal["zero_copy", "copy"] = Field(
        default="zero_copy", description="zero_copy: engines map the keeper's memory; copy: the engine owns a clone"
    )
    on_miss: Literal["fail", "load"] = Field(
        default="fail",
        description="what an engine does if the keeper has not its weights: exit, or read them and donate them",
    )
    wait_s: Seconds = Field(
        default=600.0, alias="wait", description="how long an engine waits for its weights to become resident"
    )
    verify: Literal["stat", "signature", "full"] = Field(
        default="stat",
        description="what an engine's start checks: the signature and each file's stat, the signature, or every byte",
    )
    draft: Draft | None = Field(default=None, description="draft model for speculative decoding")
    engine: Engine = Field(description="the inference server", examples=[{"port": 8001}])
    health: Health = Field(default=Health(), description="the keeper's health and metrics endpoint")

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """Return its folders of weights: its own and, where the draft has one, that."""
        draft = None if self.draft is None else self.draft.checkpoint
        return (self.checkpoint,) if draft is None else (self.checkpoint, draft)


class Trust(Settings):
    """Which checkpoints may be served."""

    policy: Literal["signed", "local"] = Field(
        default="signed", description="signed: by one of the keys; local: as they were when this host first loaded them"
    )
    keys: tuple[AbsolutePath, ...] = Field(
        default=(Path("/etc/appliance/trust"),), description="public keys in PEM, or folders of them"
    )


class Directories(Settings):
    """Where the appliance keeps its files."""

    runtime: AbsolutePath = Field(default=Path("/run/appliance"), description="sockets; gone after a reboot")
    state: AbsolutePath = Field(default=Path("/var/lib/appliance"), description="pinned digests")
    cache: AbsolutePath = Field(
        default=Path("/var/cache/appliance"), description="what engines compile; may be deleted"
    )


class Manifest(Settings):
    """The whole file."""

    models: Mapping[ModelName, Model] = Field(description="what is kept and served, by name", examples=[{}])
    trust: Trust = Field(default=Trust(), description="which checkpoints may be served")
    directories: Directories = Field(default=Directories(), description="where the appliance keeps its files")
    group: Text | None = Field(
        default="appliance", description="whose members may connect to the keepers; null for the owner alone"
    )

    def model(self, name: str) -> Model:
        """Return one model's settings; ConfigError if the manifest has none of that name."""
        if name not in self.models:
            known = ", ".join(self.models) or "none"
            raise ConfigError(f"the manifest has no model {name!r}", hint=f"its models: {known}")
        return self.models[name]

    def gpus(self) -> tuple[int | str, ...]:
        """Return every GPU that some model names, as it names it."""
        return tuple(gpu for model in self.models.values() for gpu in model.gpus)

    def socket_path(self, name: str) -> Path:
        """Return where the keeper of this model listens."""
        return self.directories.runtime / name / "keeper.sock"
