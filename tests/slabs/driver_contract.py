"""What the project takes for granted about CUDA's memory calls, as tests: run on the fake driver and on a real one.

A real driver that fails one of these says where the fake is wrong.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from appliance.slabs.cuda_driver import CudaDevice, CudaError


class DriverContract:
    """The tests; `gpu` is an open device."""

    def test_a_context_has_memory_and_a_granularity(self, gpu: CudaDevice) -> None:
        free_bytes, total_bytes = gpu.memory()
        assert 0 < free_bytes <= total_bytes
        assert gpu.granularity_bytes == 2 << 20
        assert gpu.compute_capability >= (7, 0)

    def test_memory_comes_in_whole_granules(self, gpu: CudaDevice) -> None:
        for size_bytes in (0, gpu.granularity_bytes - 4096, gpu.granularity_bytes + 4096):
            with pytest.raises(CudaError):
                gpu.create(size_bytes)

    def test_more_than_there_is_is_out_of_memory(self, gpu: CudaDevice) -> None:
        with pytest.raises(CudaError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
            gpu.create(1 << 50)

    def test_memory_lives_behind_a_descriptor_alone(self, gpu: CudaDevice) -> None:
        with _created(gpu) as handle:
            fd = gpu.export(handle)
        try:
            imported = gpu.import_handle(fd)
            assert gpu.home(imported) == gpu.ordinal
            with _reserved(gpu) as address, _mapped(gpu, address, imported):
                pass
            gpu.release(imported)
        finally:
            os.close(fd)

    def test_memory_lives_in_a_mapping_alone(self, gpu: CudaDevice) -> None:
        with _reserved(gpu) as address:
            with _created(gpu) as handle:
                gpu.map(address, gpu.granularity_bytes, handle)
            gpu.allow(address, gpu.granularity_bytes, writable=True)
            gpu.unmap(address, gpu.granularity_bytes)

    def test_every_export_is_a_descriptor_of_its_own(self, gpu: CudaDevice) -> None:
        with _created(gpu) as handle:
            first, second = gpu.export(handle), gpu.export(handle)
            os.close(first)
            gpu.release(gpu.import_handle(second))
            os.close(second)

    def test_what_the_driver_did_not_export_it_does_not_import(self, gpu: CudaDevice) -> None:
        reading, writing = os.pipe()
        os.close(writing)
        with pytest.raises(CudaError, match="cuMemImport"):
            gpu.import_handle(reading)
        os.close(reading)
        with pytest.raises(CudaError, match="cuMemImport"):
            gpu.import_handle(reading)

    def test_an_address_is_mapped_only_where_it_is_reserved(self, gpu: CudaDevice) -> None:
        with _created(gpu) as handle, pytest.raises(CudaError, match="cuMemMap"):
            gpu.map(1 << 46, gpu.granularity_bytes, handle)

    def test_an_address_is_mapped_once(self, gpu: CudaDevice) -> None:
        with (
            _created(gpu) as handle,
            _created(gpu) as other,
            _reserved(gpu) as address,
            _mapped(gpu, address, handle),
            pytest.raises(CudaError, match="cuMemMap"),
        ):
            gpu.map(address, gpu.granularity_bytes, other)

    def test_no_more_is_mapped_than_there_is(self, gpu: CudaDevice) -> None:
        size_bytes = 2 * gpu.granularity_bytes
        address = gpu.reserve(size_bytes)
        with _created(gpu) as handle, pytest.raises(CudaError, match="cuMemMap"):
            gpu.map(address, size_bytes, handle)
        gpu.free(address, size_bytes)

    def test_what_is_not_mapped_is_not_allowed(self, gpu: CudaDevice) -> None:
        with _reserved(gpu) as address, pytest.raises(CudaError, match="cuMemSetAccess"):
            gpu.allow(address, gpu.granularity_bytes, writable=True)

    def test_a_reservation_is_freed_as_a_whole(self, gpu: CudaDevice) -> None:
        address = gpu.reserve(2 * gpu.granularity_bytes)
        with pytest.raises(CudaError, match="cuMemAddressFree"):
            gpu.free(address, gpu.granularity_bytes)
        gpu.free(address, 2 * gpu.granularity_bytes)

    def test_a_mapped_reservation_is_not_freed(self, gpu: CudaDevice) -> None:
        with (
            _created(gpu) as handle,
            _reserved(gpu) as address,
            _mapped(gpu, address, handle),
            pytest.raises(CudaError, match="cuMemAddressFree"),
        ):
            gpu.free(address, gpu.granularity_bytes)


@contextmanager
def _created(gpu: CudaDevice) -> Iterator[int]:
    handle = gpu.create(gpu.granularity_bytes)
    yield handle
    gpu.release(handle)


@contextmanager
def _reserved(gpu: CudaDevice) -> Iterator[int]:
    address = gpu.reserve(gpu.granularity_bytes)
    yield address
    gpu.free(address, gpu.granularity_bytes)


@contextmanager
def _mapped(gpu: CudaDevice, address: int, handle: int) -> Iterator[None]:
    gpu.map(address, gpu.granularity_bytes, handle)
    gpu.allow(address, gpu.granularity_bytes, writable=True)
    yield
    gpu.unmap(address, gpu.granularity_bytes)
