"""The device that one rank computes on, and that its shard lies in."""

import os
from collections.abc import MutableMapping

from appliance.slabs.devices import CPU
from appliance.target import Target, devices

RANK = 0


def show_only_own(target: Target, environ: MutableMapping[str, str] = os.environ) -> None:
    """Leave this process no GPU but its model's; call it before CUDA is first used."""
    own = [device for device in devices(target.model) if device != CPU]
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def device_of(target: Target) -> str:
    """Return `cpu`, or the UUID of the rank's GPU."""
    return devices(target.model)[RANK]
