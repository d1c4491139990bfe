"""NVRTC without a GPU: compiles a kernel for this CPU with g++, one thread of the kernel after the other.

Enough for kernels whose threads do not speak with each other. What it makes is loaded by `FakeCuda`.
"""

import ctypes
import re
import subprocess
import tempfile
from enum import IntEnum
from pathlib import Path
from typing import Any

_HEADER = """
#define __global__
#define __device__
struct dim { unsigned x, y, z; };
static dim gridDim, blockDim, blockIdx, threadIdx;
struct ulonglong2 { unsigned long long x, y; };
"""
_LAUNCHER = """
extern "C" void launch_{name}(unsigned blocks, unsigned threads, void **arguments)
{{
    gridDim = {{blocks, 1, 1}}, blockDim = {{threads, 1, 1}};
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            {name}({arguments});
}}
"""
_KERNEL = re.compile(r"__global__ void (\w+)\(([^)]*)\)")


class nvrtcResult(IntEnum):  # noqa: N801
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6


class FakeNvrtc:
    """`cuda.bindings.nvrtc` as far as the project calls it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[str, bytes] = {}

    def nvrtcCreateProgram(self, source: bytes, name: bytes, *headers: Any) -> tuple[Any, ...]:  # noqa: N802
        return nvrtcResult.NVRTC_SUCCESS, source.decode()

    def nvrtcCompileProgram(self, program: str, count: int, options: list[bytes]) -> tuple[Any, ...]:  # noqa: N802
        assert len(options) == count
        launchers = (
            _LAUNCHER.format(
                name=name,
                arguments=", ".join(
                    f"*({kind} *)arguments[{index}]"
                    for index, kind in enumerate(re.sub(r"\w+$", "", argument.strip()) for argument in given.split(","))
                ),
            )
            for name, given in _KERNEL.findall(program)
        )
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            source.write_text(_HEADER + program + "".join(launchers))
            done = subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", library, source], check=False)
            if done.returncode:
                return (nvrtcResult.NVRTC_ERROR_COMPILATION,)
            self._images[program] = library.read_bytes()
        return (nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcGetCUBINSize(self, program: str) -> tuple[Any, ...]:  # noqa: N802
        return nvrtcResult.NVRTC_SUCCESS, len(self._images[program])

    def nvrtcGetCUBIN(self, program: str, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        # As the real one does, it writes into the bytes object that it is given.
        ctypes.memmove(ctypes.cast(ctypes.c_char_p(image), ctypes.c_void_p), self._images[program], len(image))
        return (nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcDestroyProgram(self, program: str) -> tuple[Any, ...]:  # noqa: N802
        return (nvrtcResult.NVRTC_SUCCESS,)

    def load(self, image: bytes) -> ctypes.CDLL:
        """Return the compiled code as a library of this process."""
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".so") as file:
            file.write(image)
            file.flush()
            return ctypes.CDLL(file.name)
