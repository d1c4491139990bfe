import contextlib
import gc
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from appliance.descriptors import Descriptor
from appliance.errors import ApplianceError, ConfigError, HostError, PeerError, ResourceError
from appliance.slabs.cuda import CudaBackend
from appliance.slabs.devices import backend
from appliance.slabs.interface import LIMIT_SLABS, slab_bytes
from tests.slabs.fake_driver import FakeCuda, FakeGpu
from tests.slabs.fake_results import CUresult

SIZE = 4 << 20
UNRETURNED = {
    "cuMemRelease": Counter(handles=1),
    "cuMemUnmap": Counter(mappings=1, reservations=1),
    "cuMemAddressFree": Counter(reservations=1),
}
FIRST, SECOND = (f"GPU-{uuid.UUID(int=number)}" for number in (0xA0, 0xB1))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    fake = FakeCuda([FakeGpu(FIRST, total_bytes=64 << 20), FakeGpu(SECOND, total_bytes=64 << 20)])
    yield fake
    gc.collect()
    assert not fake.faults


def test_a_gpu_is_a_device_with_a_backend() -> None:
    with pytest.raises(ApplianceError) as raised:  # no bindings here, or no such GPU
        backend(FIRST)
    assert "slab backend" not in str(raised.value)
    with pytest.raises(ConfigError, match="no slab backend for device 'cuda:0'"):
        backend("cuda:0")


def test_a_full_gpu_needs_few_descriptors(fake: FakeCuda) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    assert slab_bytes(gpu, 140 << 30) == 4 << 30
    assert LIMIT_SLABS > 2 * (140 << 30) // (4 << 30)


def test_out_of_memory_says_how_much_was_wanted_and_how_much_is_free(fake: FakeCuda) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    with gpu.create("kept", 40 << 20), pytest.raises(ResourceError) as raised:
        gpu.create("weights", 32 << 20)
    assert raised.value.message == f"slab 'weights': 32 MiB wanted, 24 MiB of 64 MiB free on GPU {FIRST}"
    assert "kept" not in fake.live


def test_memory_is_free_again_when_a_slab_is_closed(fake: FakeCuda) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    for _ in range(5):
        gpu.create("weights", 64 << 20).close()
    with gpu.create("weights", 64 << 20) as slab:
        descriptor = slab.seal()
    with pytest.raises(ResourceError):
        gpu.create("another", SIZE)
    descriptor.close()
    gpu.create("another", SIZE).close()


def test_a_sealed_slab_is_held_by_nothing_but_its_descriptor(fake: FakeCuda) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    with gpu.create("weights", SIZE) as slab, slab.seal():
        assert fake.live == {"contexts": 1}


def test_the_device_is_done_before_a_mapping_goes(fake: FakeCuda) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    with gpu.create("weights", SIZE) as slab:
        fake.busy = True
        descriptor = slab.seal()
    assert not fake.busy
    with descriptor:
        mapping = gpu.map(descriptor, SIZE)
    window = mapping.window(0, 16)
    mapping.close()
    fake.busy = True
    del window
    assert not fake.busy
    assert not fake.faults


def test_a_mapping_can_be_read_and_a_slab_written(fake: FakeCuda) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    with gpu.create("weights", SIZE) as slab:
        assert [mapped.access for mapped in fake._mappings.values()] == ["rw"]
        descriptor = slab.seal()
    with descriptor, gpu.map(descriptor, SIZE):
        assert [mapped.access for mapped in fake._mappings.values()] == ["r"]


def test_a_mapping_is_of_its_own_gpu_alone(fake: FakeCuda) -> None:
    gpu = CudaBackend(SECOND, bindings=fake)
    with gpu.create("weights", SIZE) as slab:
        assert [mapped.accessors for mapped in fake._mappings.values()] == [{1}]
        descriptor = slab.seal()
    with descriptor, gpu.map(descriptor, SIZE):
        assert [mapped.accessors for mapped in fake._mappings.values()] == [{1}]


def test_a_slab_of_another_gpu_is_refused(fake: FakeCuda) -> None:
    with CudaBackend(SECOND, bindings=fake).create("weights", SIZE) as slab, slab.seal() as descriptor:
        with pytest.raises(PeerError, match=f"memory of another GPU than {FIRST}"):
            CudaBackend(FIRST, bindings=fake).map(descriptor, SIZE)
        assert "mappings" not in fake.live


def test_a_slab_of_a_gpu_that_is_not_visible_is_refused(fake: FakeCuda) -> None:
    alone = FakeCuda([FakeGpu(FIRST)])
    with (
        CudaBackend(SECOND, bindings=fake).create("weights", SIZE) as slab,
        slab.seal() as descriptor,
        pytest.raises(PeerError, match="CUDA_ERROR_INVALID_DEVICE"),
    ):
        CudaBackend(FIRST, bindings=alone).map(descriptor, SIZE)


@pytest.mark.parametrize("size_bytes", [0, -SIZE, SIZE + 4096])
def test_a_size_that_no_slab_has_is_refused(fake: FakeCuda, size_bytes: int) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    with (
        gpu.create("weights", SIZE) as slab,
        slab.seal() as descriptor,
        pytest.raises(PeerError, match="announced"),
    ):
        gpu.map(descriptor, size_bytes)


def test_a_window_says_what_torch_asks(fake: FakeCuda) -> None:
    with CudaBackend(FIRST, bindings=fake).create("weights", SIZE) as slab:
        start = slab.window(0, SIZE).address
        window = slab.window(512, 1000)
        assert window.__cuda_array_interface__ == {
            "shape": (1000,),
            "typestr": "|u1",
            "data": (start + 512, False),
            "strides": None,
            "version": 3,
        }
        assert start % gpu_granularity(fake) == 0
        del window


def gpu_granularity(fake: FakeCuda) -> int:
    return CudaBackend(FIRST, bindings=fake).granularity_bytes


def _create(gpu: CudaBackend) -> None:
    gpu.create("weights", SIZE).close()


def _seal(gpu: CudaBackend) -> None:
    with gpu.create("weights", SIZE) as slab:
        slab.seal().close()


def _attach(gpu: CudaBackend) -> None:
    with gpu.create("weights", SIZE) as slab, slab.seal() as descriptor:
        mapping = gpu.map(descriptor, SIZE)
    window = mapping.window(0, 1)
    mapping.close()
    del window


def _attach_in_vain(gpu: CudaBackend) -> None:
    with gpu.create("weights", SIZE) as slab, slab.seal() as descriptor, contextlib.suppress(PeerError):
        gpu.map(descriptor, 2 * SIZE)


def _attach_all(gpu: CudaBackend) -> None:
    with contextlib.ExitStack() as stack:
        slabs = []
        for _ in range(2):
            with gpu.create("weights", SIZE) as slab:
                slabs.append(stack.enter_context(slab.seal()))
        for mapping in gpu.map_all(slabs, [SIZE, SIZE]):
            mapping.close()


@pytest.mark.parametrize("result", [CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_DEINITIALIZED], ids=str)
@pytest.mark.parametrize("act", [_create, _seal, _attach, _attach_in_vain, _attach_all])
def test_whichever_call_fails_nothing_else_stays(act: Callable[[CudaBackend], None], result: CUresult) -> None:
    whole = FakeCuda()
    gpu = CudaBackend(whole.gpus[0].uuid, bindings=whole)
    opened = len(whole.calls)
    act(gpu)
    assert len(whole.calls) > opened
    descriptors = _descriptors()
    for number in range(opened, len(whole.calls)):
        if whole.calls[number] == "cuCtxPopCurrent":
            continue
        fake = FakeCuda()
        gpu = CudaBackend(fake.gpus[0].uuid, bindings=fake)
        fake.fail(number, result)
        with contextlib.suppress(ApplianceError):
            act(gpu)
        # What could not be given back is what the failing call would have given back, and what hangs on that.
        failed = whole.calls[number + (whole.calls[number] == "cuCtxPushCurrent")]
        left = fake.live
        del left["contexts"]
        assert left <= UNRETURNED.get(failed, Counter()), f"{failed} (call {number})"
        fake.drop_memory()
        assert _descriptors() == descriptors, f"{failed} (call {number})"


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (CUresult.CUDA_ERROR_OUT_OF_MEMORY, ResourceError),
        (CUresult.CUDA_ERROR_OPERATING_SYSTEM, ResourceError),
        (CUresult.CUDA_ERROR_DEINITIALIZED, HostError),
        (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, HostError),
    ],
)
def test_a_slab_that_cannot_be_made_says_who_must_act(
    fake: FakeCuda, result: CUresult, kind: type[ApplianceError]
) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    before = len(fake.calls)
    gpu.create("weights", SIZE).close()
    numbers = [number for number, call in enumerate(fake.calls) if number >= before and call != "cuCtxPushCurrent"]
    for call in ("cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess"):
        offset = next(number for number in numbers if fake.calls[number] == call) - before
        fake.fail(len(fake.calls) + offset, result)
        with pytest.raises(kind, match="slab 'weights': 4 MiB wanted"):
            gpu.create("weights", SIZE)


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (CUresult.CUDA_ERROR_OUT_OF_MEMORY, ResourceError),
        (CUresult.CUDA_ERROR_INVALID_VALUE, PeerError),
        (CUresult.CUDA_ERROR_INVALID_DEVICE, PeerError),
        (CUresult.CUDA_ERROR_NOT_SUPPORTED, PeerError),
        (CUresult.CUDA_ERROR_UNKNOWN, PeerError),
        (CUresult.CUDA_ERROR_DEINITIALIZED, HostError),
    ],
)
def test_a_slab_that_cannot_be_mapped_says_who_must_act(
    fake: FakeCuda, result: CUresult, kind: type[ApplianceError]
) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    with gpu.create("weights", SIZE) as slab, slab.seal() as descriptor:
        fake.fail(len(fake.calls) + 1, result)  # the first call is the push of the context
        with pytest.raises(kind, match="slab: "):
            gpu.map(descriptor, SIZE)


def test_a_driver_that_is_gone_is_the_hosts_fault_and_closing_stays_harmless(fake: FakeCuda) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    slab = gpu.create("weights", SIZE)
    with gpu.create("other", SIZE) as other, other.seal() as descriptor:
        mapping = gpu.map(descriptor, SIZE)
        window = mapping.window(0, 1)
        fake.break_down()
        with pytest.raises(HostError, match="cannot seal a slab"):
            slab.seal()
        with pytest.raises(HostError, match="cannot map it"):
            gpu.map(descriptor, SIZE)
        with pytest.raises(HostError, match="refuses"):
            gpu.create("third", SIZE)
    slab.close()
    mapping.close()
    del window
    fake.break_down(None)
    fake.drop_memory()


def test_an_exhausted_table_of_descriptors_is_a_shortage(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)

    def refuse(fd: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", refuse)
    with pytest.raises(ResourceError) as raised:
        gpu.create("weights", SIZE)
    assert raised.value.hint is not None
    assert "LimitNOFILE" in raised.value.hint
    assert fake.live == {"contexts": 1}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_the_descriptor_of_a_refused_slab_stays_its_owners(fake: FakeCuda) -> None:
    gpu = CudaBackend(FIRST, bindings=fake)
    with Descriptor(os.open("/dev/null", os.O_RDONLY)) as descriptor:
        with pytest.raises(PeerError, match="no 4 MiB of memory of GPU"):
            gpu.map(descriptor, SIZE)
        assert os.fstat(descriptor.fileno())
