"""The contract of slab backends, on those that need no GPU; tests/gpu runs it on one that does."""

import gc
from collections.abc import Iterator

import pytest

from tests.slabs.contract import BackendContract
from tests.slabs.labs import FakeCudaLab, MemfdLab


class TestMemfd(BackendContract):
    @pytest.fixture
    def lab(self) -> MemfdLab:
        return MemfdLab()


class TestCudaWithoutAGpu(BackendContract):
    @pytest.fixture
    def lab(self) -> Iterator[FakeCudaLab]:
        lab = FakeCudaLab()
        fake = lab.fake
        yield lab
        del lab.backend
        left = fake.live
        del left["contexts"]
        assert not left
        gc.collect()  # errors have seen the device and are in cycles with their tracebacks
        assert not fake.live
        assert not fake.faults
