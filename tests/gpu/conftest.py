"""Tests on a real NVIDIA GPU: `pytest tests/gpu`. Without one they skip, saying so.

The CUDA driver opens descriptors of its own whenever it likes, so what a test leaves open is not counted here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.slabs.cuda import CudaBackend

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, and nothing else of the session."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.leaks("the CUDA driver opens descriptors of its own"))


@pytest.fixture
def cuda() -> Any:
    from cuda.bindings import driver

    return driver


@pytest.fixture
def uuid() -> str:
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


@pytest.fixture
def backend(uuid: str) -> Iterator[CudaBackend]:
    """The first GPU; nothing may be allocated on it any more when the test is over."""
    backend = CudaBackend(uuid)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = backend.gpu.memory()[0]
    yield backend
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    left = before - backend.gpu.memory()[0]
    # Modules and contexts of other libraries take some; a slab that nobody freed would be more.
    assert left < 256 << 20, f"{left} bytes of device memory are not given back"
