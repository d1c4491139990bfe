import os

import torch

from appliance import inventory
from appliance.gpus import gpu_states


def test_nvml_the_driver_and_torch_speak_of_the_same_gpus(uuid: str) -> None:
    states = gpu_states()
    assert uuid in [state.uuid for state in states]
    state = next(state for state in states if state.uuid == uuid)
    properties = torch.cuda.get_device_properties(0)
    assert state.model == properties.name
    assert state.compute_capability == f"{properties.major}.{properties.minor}"
    assert 0 < state.used_bytes < state.total_bytes
    # The /proc files are not there in every sandbox; where they are, they agree.
    if present := inventory.gpus():
        assert [gpu.uuid for gpu in present] == [state.uuid for state in states]


def test_our_own_context_is_listed(uuid: str) -> None:
    torch.zeros(1, device="cuda:0")
    state = next(state for state in gpu_states() if state.uuid == uuid)
    # In a PID namespace NVML may count from another one: then at least somebody is listed.
    assert os.getpid() in [process.pid for process in state.processes] or state.processes
