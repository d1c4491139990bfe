"""What a device is, as far as it decides whether another one can use the same bytes."""

import torch

from appliance.slabs.devices import CPU
from appliance.tensors.storage import torch_device


def device_facts(device: str) -> dict[str, object]:
    """Return the facts about a device that decide whether another can use the same bytes."""
    if device == CPU:
        return {"device.kind": "cpu"}
    properties = torch.cuda.get_device_properties(torch_device(device))
    return {
        "device.kind": "cuda",
        "device.model": properties.name,
        "device.capability": f"{properties.major}.{properties.minor}",
    }
