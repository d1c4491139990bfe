"""Which backend a device has, and what it costs to know."""

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.errors import ConfigError
from appliance.slabs.devices import backend
from appliance.slabs.memfd import MemfdBackend

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_cpu_has_memory_files() -> None:
    assert isinstance(backend("cpu"), MemfdBackend)


@pytest.mark.parametrize("device", ["", "CPU", "cuda:0", "0", "gpu-1"])
def test_an_unknown_device_is_the_operators_mistake(device: str) -> None:
    with pytest.raises(ConfigError, match="no slab backend for device"):
        backend(device)


def test_a_keeper_may_know_layouts_and_slabs_without_torch() -> None:
    names = "appliance.layout, appliance.slabs.devices, appliance.slabs.memfd"
    program = f"import sys, {names}; print(*sys.modules.keys() & {{'torch', 'cuda', 'pydantic', 'yaml', 'numpy'}})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""
