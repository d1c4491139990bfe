"""Loads a checkpoint from disk for the built-in engine: verified while it is read, then built by transformers."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from appliance import configs
from appliance.checkpoint.reader import read_verified
from appliance.checkpoint.safetensors import TensorInfo
from appliance.engine.device import device_of
from appliance.engine.model import load
from appliance.errors import ConfigError, ResourceError
from appliance.handover.source import Loaded
from appliance.progress import telling
from appliance.quantities import format_size
from appliance.target import Target
from appliance.tensors.storage import torch_device

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
    """Return the model; TrustError naming the first file that is not as signed or pinned."""
    started = time.monotonic()
    tensors: dict[str, torch.Tensor] = {}

    def allocate(info: TensorInfo) -> memoryview:
        if info.dtype not in DTYPES:
            raise ConfigError(f"{info.name}: dtype {info.dtype} is nothing the built-in engine computes with")
        try:
            tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        except RuntimeError as error:
            raise ResourceError(f"{info.name}: no memory for {info.size_bytes} bytes") from error
        tensors[info.name] = tensor
        return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

    identity = target.identity
    read = read_verified(
        identity.root, identity.manifest, allocate=allocate, on_progress=telling("loading", on_progress)
    )
    verified = time.monotonic()
    on_progress("building the model")
    with tempfile.TemporaryDirectory(prefix="appliance-configs-") as folder:
        configs.write(read.configs, Path(folder))
        module = _moved(load(Path(folder), tensors, dtype=target.model.dtype), torch_device(device_of(target)))
    built = time.monotonic()
    phases = {"verify": verified - started, "build": built - verified, "load": built - started}
    return Loaded(module, read.configs, read.files, phases)


def _moved(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return the module on its device; each tensor's host memory is freed once it has been copied."""
    try:
        return module.to(device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ResourceError(
            f"no room for the weights on {device}: {format_size(free)} of {format_size(total)} are free",
            hint="see who holds the memory: appliance status",
        ) from error
