import gc
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import ConfigError, HostError
from appliance.slabs import cuda_driver
from appliance.slabs.cuda_driver import CudaDevice, CudaError, compile_kernel, load_bindings, open_device
from tests.slabs.driver_contract import DriverContract
from tests.slabs.fake_driver import FakeCuda, FakeGpu
from tests.slabs.fake_results import CUresult

_RELEASE = "cuDevicePrimaryCtxRelease"
FIRST, SECOND = (f"GPU-{uuid.UUID(int=number)}" for number in (0xA0, 0xB1))


class TestFakeDriver(DriverContract):
    @pytest.fixture
    def gpu(self) -> Iterator[CudaDevice]:
        fake = FakeCuda()
        gpu = open_device(fake.gpus[0].uuid, bindings=fake)
        yield gpu
        assert fake.live == {"contexts": 1}


def test_a_release_is_refused_the_second_time() -> None:
    # Not in the contract: a real driver may have given the number away again.
    fake = FakeCuda()
    gpu = open_device(fake.gpus[0].uuid, bindings=fake)
    handle = gpu.create(2 << 20)
    gpu.release(handle)
    with pytest.raises(CudaError, match="cuMemRelease: CUDA_ERROR_INVALID_VALUE"):
        gpu.release(handle)


def test_a_released_handle_is_unknown() -> None:
    # Not in the contract: driver 580 crashes the process that exports a handle it has released.
    fake = FakeCuda()
    gpu = open_device(fake.gpus[0].uuid, bindings=fake)
    handle = gpu.create(gpu.granularity_bytes)
    gpu.release(handle)
    with pytest.raises(CudaError, match="cuMemExport"):
        gpu.export(handle)
    address = gpu.reserve(gpu.granularity_bytes)
    with pytest.raises(CudaError, match="cuMemMap"):
        gpu.map(address, gpu.granularity_bytes, handle)
    gpu.free(address, gpu.granularity_bytes)


def test_a_mapping_is_unmapped_once() -> None:
    # Not in the contract: driver 580 takes it without a word, and the fake makes it show.
    fake = FakeCuda()
    gpu = open_device(fake.gpus[0].uuid, bindings=fake)
    address = gpu.reserve(gpu.granularity_bytes)
    with pytest.raises(CudaError, match="cuMemUnmap"):
        gpu.unmap(address, gpu.granularity_bytes)
    gpu.free(address, gpu.granularity_bytes)


def test_a_gpu_is_found_by_uuid_whatever_its_number() -> None:
    fake = FakeCuda([FakeGpu(FIRST), FakeGpu(SECOND)])
    assert [open_device(uuid, bindings=fake).ordinal for uuid in (SECOND, FIRST)] == [1, 0]


def test_a_part_of_a_gpu_is_found_by_its_own_uuid() -> None:
    fake = FakeCuda([FakeGpu(FIRST)])
    assert open_device(FIRST.replace("GPU", "MIG"), bindings=fake).ordinal == 0


def test_a_gpu_that_is_not_visible_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=f"GPU {SECOND} is not visible") as raised:
        open_device(SECOND, bindings=FakeCuda([FakeGpu(FIRST)]))
    assert raised.value.hint == f"visible: {FIRST}; CUDA_VISIBLE_DEVICES is '0'"


def test_a_host_without_visible_gpus_is_the_operators_affair() -> None:
    with pytest.raises(ConfigError) as raised:
        open_device(FIRST, bindings=FakeCuda([]))
    assert raised.value.hint == "visible: none"


def test_a_driver_that_does_not_start_is_the_hosts_fault() -> None:
    fake = FakeCuda()
    fake.break_down(CUresult.CUDA_ERROR_NOT_INITIALIZED)
    with pytest.raises(HostError, match="does not start: cuInit: CUDA_ERROR_NOT_INITIALIZED"):
        open_device(fake.gpus[0].uuid, bindings=fake)


def test_a_gpu_without_exportable_memory_is_refused() -> None:
    fake = FakeCuda([FakeGpu(FIRST, supports_descriptors=False)])
    with pytest.raises(HostError, match="memory behind file descriptors"):
        open_device(FIRST, bindings=fake)
    assert not fake.live


def test_a_device_that_fails_to_open_holds_no_context() -> None:
    whole = FakeCuda()
    open_device(whole.gpus[0].uuid, bindings=whole)
    # What gives back cannot fail in this world: nobody could do anything about it.
    numbers = [number for number, call in enumerate(whole.calls) if call not in ("cuCtxPopCurrent", _RELEASE)]
    for number in numbers:
        fake = FakeCuda()
        fake.fail(number, CUresult.CUDA_ERROR_DEINITIALIZED)
        with pytest.raises(HostError, match="CUDA_ERROR_DEINITIALIZED"):
            open_device(fake.gpus[0].uuid, bindings=fake)
        gc.collect()
        assert not fake.live, whole.calls[number]


def test_the_context_is_shared_and_given_back_with_the_last_device() -> None:
    fake = FakeCuda()
    first, second = (open_device(fake.gpus[0].uuid, bindings=fake) for _ in range(2))
    assert fake.gpus[0].retained == 2
    del first
    assert second.memory() == (1 << 30, 1 << 30)
    del second
    assert not fake.live


def test_no_call_leaves_its_context_current() -> None:
    fake = FakeCuda()
    gpu = open_device(fake.gpus[0].uuid, bindings=fake)
    with pytest.raises(CudaError):
        gpu.create(1)
    gpu.memory()
    assert "pushed" not in fake.live


def test_a_block_of_calls_pushes_the_context_once_in_each_thread() -> None:
    fake = FakeCuda()
    gpu = open_device(fake.gpus[0].uuid, bindings=fake)
    push, threads = fake.cuCtxPushCurrent, []

    def pushed(context: object) -> object:
        threads.append(threading.get_ident())
        return push(context)

    vars(fake)["cuCtxPushCurrent"] = pushed
    with gpu.current():
        gpu.memory()
        with gpu.current():
            gpu.memory()
        other = threading.Thread(target=gpu.memory)
        other.start()
        other.join()
        gpu.memory()
    assert threads == [threading.get_ident(), other.ident]
    with pytest.raises(CudaError), gpu.current():
        gpu.create(1)
    assert "pushed" not in fake.live
    gpu.memory()
    assert len(threads) == 4


def test_nothing_of_cuda_is_imported_before_a_device_is_opened() -> None:
    program = (
        "import sys, appliance.slabs.cuda, appliance.slabs.devices; print([n for n in sys.modules if n[:4] == 'cuda'])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_missing_bindings_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for use in (load_bindings, lambda: compile_kernel("", compute_capability=(9, 0))):
        with pytest.raises(ConfigError, match="cuda-bindings") as raised:
            use()
        assert raised.value.hint == "pip install 'appliance[cuda]'"


def test_a_missing_driver_library_is_the_hosts_fault() -> None:
    class NoLibrary:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(HostError, match="no NVIDIA driver library"):
        open_device(FIRST, bindings=NoLibrary())


def test_a_source_that_nvrtc_refuses_is_destroyed() -> None:
    calls: list[str] = []

    def answer(name: str, code: int = 0) -> Any:
        def call(*arguments: object) -> tuple[Any, ...]:
            calls.append(name)
            return (_Result(code), "program") if name == "nvrtcCreateProgram" else (_Result(code),)

        return call

    nvrtc = SimpleNamespace(
        nvrtcCreateProgram=answer("nvrtcCreateProgram"),
        nvrtcCompileProgram=answer("nvrtcCompileProgram", 6),
        nvrtcDestroyProgram=answer("nvrtcDestroyProgram"),
    )
    with pytest.raises(HostError, match="NVRTC_ERROR_6"):
        compile_kernel("nonsense", compute_capability=(9, 0), nvrtc=nvrtc)
    assert calls[-1] == "nvrtcDestroyProgram"


def test_every_name_that_is_called_is_in_the_real_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    source = Path(cuda_driver.__file__).read_text()
    for name in set(re.findall(r"\b(cu[A-Z]\w+|CU[a-z]\w+)", source)) - {"CUresult"}:
        assert hasattr(driver, name), name
    for name in set(re.findall(r"\bnvrtc[A-Z]\w+", source)):
        assert hasattr(nvrtc, name), name
    for owner, member in set(re.findall(r"(CU\w+)\.(CU_\w+)", source)):
        assert hasattr(getattr(driver, owner), member), member
    for member in set(re.findall(r"\bCU_DEVICE_ATTRIBUTE_\w+", source)):
        assert hasattr(driver.CUdevice_attribute, member), member
    for member in set(re.findall(r"\bCUDA_ERROR_\w+", source)):
        assert hasattr(driver.CUresult, member), member


class _Result(int):
    @property
    def name(self) -> str:
        return f"NVRTC_ERROR_{int(self)}"
