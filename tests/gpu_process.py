"""`python -m tests.gpu_process MODULE ARGUMENTS`: one of the appliance's processes on the GPUs that a test names.

GPUS has their UUIDs, so that no file of a driver is needed. With FAKE they are fake ones, in host memory. With CROWDED
none has room for a second generation of weights. Every process that such a process starts with its own Python is
another one.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from appliance import inventory, room
from appliance.inventory import Gpu

GPUS = "TEST_GPUS"
FAKE = "TEST_FAKE_GPUS"
CROWDED = "TEST_CROWDED"
PYTHON = "TEST_GPU_PYTHON"
REPOSITORY = Path(__file__).parent.parent
WITH_TORCH = ("appliance.loader", "appliance.engine", "appliance")


def make_python(path: Path) -> Path:
    """Write the program that stands for Python in these processes: a module that it shall run, it runs by this one."""
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then shift; exec {sys.executable} -m tests.gpu_process "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def environment(python: Path, uuids: tuple[str, ...], *, fake: bool) -> dict[str, str]:
    """Return what such a process needs to find in its environment."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(paths), GPUS: ",".join(uuids), PYTHON: str(python)}
    return found | ({FAKE: "1"} if fake else {})


@contextmanager
def gpus(uuids: tuple[str, ...], *, fake: bool, torch: bool = True, boot: str = "0") -> Iterator[None]:
    """Let these be this process's GPUs; of fake ones, those of another boot do not know each other's memory."""
    found = [Gpu(index, uuid, "NVIDIA H200") for index, uuid in enumerate(uuids)]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(inventory, "gpus", lambda folder=None: found))
        if os.environ.get(CROWDED):
            stack.enter_context(mock.patch.object(room, "crowded", lambda identity, devices: tuple(devices)))
        if fake and torch:
            import torch as real_torch

            from appliance.engine import disk
            from appliance.engine import weights as engine_weights
            from tests.slabs.cpu_gpu import installed
            from tests.slabs.fake_driver import FakeCuda, FakeGpu

            stack.enter_context(installed(FakeCuda([FakeGpu(uuid) for uuid in uuids], boot=boot)))
            stack.enter_context(mock.patch.object(disk, "torch_device", lambda device: real_torch.device("cpu")))
            facts = {"device.kind": "cuda", "device.model": "NVIDIA H200", "device.capability": "9.0"}
            stack.enter_context(mock.patch.object(engine_weights, "device_facts", lambda device: facts))
        yield


def main() -> None:
    """Run the module."""
    import runpy

    del sys.argv[0]
    sys.executable = os.environ[PYTHON]
    fake, uuids = bool(os.environ.get(FAKE)), tuple(os.environ[GPUS].split(","))
    with gpus(uuids, fake=fake, torch=sys.argv[0] in WITH_TORCH):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
