"""Loads a checkpoint from disk for the built-in engine: verified while it is read, then built by transformers."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from appliance import configs
from appliance.checkpoint.reader import read_verified
from appliance.checkpoint.safetensors import TensorInfo
from appliance.engine.configs import stated_dtype
from appliance.engine.device import device_of
from appliance.engine.imports import import_heavy_modules
from appliance.engine.model import load
from appliance.errors import ConfigError, ResourceError
from appliance.handover.source import Loaded
from appliance.progress import telling
from appliance.quantities import format_size
from appliance.slabs.devices import CPU
from appliance.target import Target
from appliance.tensors.staging import read_to_device
from appliance.tensors.storage import torch_device

_HOST = torch.device("cpu")
# The safetensors names of what the built-in engine can compute with.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_verified(target: Target, *, on_progress: Callable[[str], None] = lambda text: None) -> Loaded:
    """Return the model; TrustError naming the first file that is not as signed or pinned.

    For a GPU the tensors go through a little page-locked host memory and never lie in host memory as a whole, but for
    those that must be converted. ResourceError where there is no room for them, before any of them is read.
    """
    started = time.monotonic()
    identity = target.identity
    with (
        tempfile.TemporaryDirectory(prefix="appliance-configs-") as folder,
        ThreadPoolExecutor(1, "imports") as pool,
    ):
        # Seconds, which reading and hashing need not wait for.
        importing = pool.submit(import_heavy_modules)
        memory = _Memory(target, Path(folder))
        progress = telling("loading", on_progress)
        if memory.device_name == CPU:
            read = read_verified(
                identity.root,
                identity.manifest,
                allocate=memory.host,
                on_configs=memory.settle,
                on_progress=progress,
            )
        else:
            read = read_to_device(
                identity.root,
                identity.manifest,
                device=memory.device,
                allocate=memory.allocate,
                on_configs=memory.settle,
                on_progress=progress,
            )
        verified = time.monotonic()
        importing.result()
        imported = time.monotonic()
        on_progress("building the model")
        module = load(Path(folder), memory.tensors, dtype=target.model.dtype)
    with memory.room(f"the weights of {target.name}"):
        # What was converted, and buffers that a constructor computes.
        module = module.to(memory.device)
    built = time.monotonic()
    phases = {
        "verify": verified - started,
        "imports_rest": imported - verified,  # an engine has its own `imports`
        "build": built - imported,
        "load": built - started,
    }
    return Loaded(module, read.configs, read.files, phases)


class _Memory:
    """Where the tensors of a checkpoint are read to; they are collected in `tensors`."""

    def __init__(self, target: Target, configs_dir: Path) -> None:
        self._dtype = target.model.dtype
        self._configs_dir = configs_dir
        self._wanted: torch.dtype | None = None
        self.device_name = device_of(target)
        self.device = torch_device(self.device_name)
        self.tensors: dict[str, torch.Tensor] = {}

    def settle(self, files: Mapping[str, bytes]) -> None:
        """Learn from the configs which dtype the model has."""
        configs.write(files, self._configs_dir)
        wanted = getattr(torch, stated_dtype(self._configs_dir, dtype=self._dtype), None)
        self._wanted = wanted if isinstance(wanted, torch.dtype) else None

    def allocate(self, info: TensorInfo) -> torch.Tensor:
        """Return memory on the device; in host memory for what is larger now than it will be in the model."""
        dtype = _dtype(info)
        shrinks = self._wanted is not None and dtype.is_floating_point and dtype.itemsize > self._wanted.itemsize
        with self.room(info.name):
            tensor = torch.empty(info.shape, dtype=dtype, device=_HOST if shrinks else self.device)
        self.tensors[info.name] = tensor
        return tensor

    def host(self, info: TensorInfo) -> memoryview:
        """Return host memory."""
        try:
            tensor = torch.empty(info.shape, dtype=_dtype(info))
        except RuntimeError as error:
            raise ResourceError(f"{info.name}: no memory for {info.size_bytes} bytes") from error
        self.tensors[info.name] = tensor
        return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

    @contextmanager
    def room(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise ResourceError(
                f"no room for {what} on GPU {self.device_name}: {format_size(free)} of {format_size(total)} are free",
                hint="see who holds the memory: appliance status",
            ) from error


def _dtype(info: TensorInfo) -> torch.dtype:
    if info.dtype not in DTYPES:
        raise ConfigError(f"{info.name}: dtype {info.dtype} is nothing the built-in engine computes with")
    return DTYPES[info.dtype]
