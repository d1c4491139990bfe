"""The device that one rank computes on, and that its shard lies in."""

import os
from collections.abc import MutableMapping

import torch

from appliance.slabs.devices import CPU
from appliance.target import Target, devices
from appliance.tensors.storage import torch_device

RANK = 0


def show_only_own(target: Target, environ: MutableMapping[str, str] = os.environ) -> None:
    """Leave this process no GPU but its model's; call it before CUDA is first used."""
    own = [device for device in devices(target.model) if device != CPU]
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def device_of(target: Target) -> str:
    """Return `cpu`, or the UUID of the rank's GPU."""
    return devices(target.model)[RANK]


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
