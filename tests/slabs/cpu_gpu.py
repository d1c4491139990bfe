"""A GPU in host memory: with the fake driver in place, slabs, packing and attaching run as on a GPU, on CPU tensors.

A process that wants one calls `installed`; its slabs can be mapped by any other that does.
"""

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from appliance.slabs import cuda, cuda_driver
from appliance.tensors import attachment, checksum, packing, storage
from tests.slabs.fake_driver import FakeCuda


@contextmanager
def installed(fake: FakeCuda) -> Iterator[FakeCuda]:
    """Let the fake's GPUs be this process's GPUs; torch tensors on them are on the CPU."""
    uuids = {gpu.uuid for gpu in fake.gpus}
    real = storage.torch_device

    def torch_device(device: str) -> torch.device:
        return torch.device("cpu") if device in uuids else real(device)

    with (
        mock.patch.object(cuda_driver, "load_bindings", lambda: fake),
        mock.patch.object(cuda, "CudaWindow", _HostWindow),
        mock.patch.object(checksum, "gpu_checksum", lambda uuid: checksum.checksum),
        mock.patch.object(storage, "torch_device", torch_device),
        mock.patch.object(packing, "torch_device", torch_device),
        mock.patch.object(attachment, "torch_device", torch_device),
        mock.patch.object(checksum, "torch_device", torch_device),
    ):
        yield fake


class _HostWindow:
    """Makes what torch takes for a buffer out of what on a GPU is a window."""

    def __new__(cls, mapped: Any, offset_bytes: int, size_bytes: int) -> Any:
        address = mapped.address + offset_bytes
        window: Any = _array(size_bytes).from_address(address)
        # The array does not own its memory: whoever has it has this attribute, and with it the mapping.
        window.mapped = mapped
        window.address, window.size_bytes = address, size_bytes
        return window


@functools.cache
def _array(size_bytes: int) -> Any:
    return type("HostWindow", (ctypes.c_uint8 * size_bytes,), {"__hash__": object.__hash__})


def main() -> None:
    """`python -m tests.slabs.cpu_gpu MODULE ARGUMENTS...`: run a module in a process that has the fake GPUs."""
    import runpy

    del sys.argv[0]
    with installed(FakeCuda()):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
