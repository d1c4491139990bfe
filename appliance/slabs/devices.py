"""The slab backend of each device."""

from appliance.errors import ConfigError
from appliance.slabs.interface import Backend
from appliance.slabs.memfd import MemfdBackend

CPU = "cpu"


def backend(device: str) -> Backend:
    """Return the backend for "cpu" or a GPU UUID; ConfigError for a device that has none."""
    if device == CPU:
        return MemfdBackend()
    raise ConfigError(f"no slab backend for device {device!r}", hint='use "cpu"')
