"""The slab backend of each device."""

from appliance.errors import ConfigError
from appliance.slabs.interface import Backend
from appliance.slabs.memfd import MemfdBackend

CPU = "cpu"


def backend(device: str) -> Backend:
    """Return the backend for "cpu" or the UUID of a GPU, or part of one, that this process sees; else ConfigError."""
    if device == CPU:
        return MemfdBackend()
    if device.startswith(("GPU-", "MIG-")):
        from appliance.slabs.cuda import CudaBackend

        return CudaBackend(device)
    raise ConfigError(f"no slab backend for device {device!r}", hint='use "cpu" or the UUID of a GPU')
