"""Bytes as tensors and tensors as bytes."""

import gc

import pytest
import torch

from appliance.errors import HostError
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.storage import DTYPES, bytes_of, copy_bytes, over, same_bytes, torch_device

CPU = torch.device("cpu")


def test_a_window_is_a_tensor_without_a_copy_and_without_a_warning() -> None:
    with MemfdBackend().create("test", 4096) as slab:
        [memory] = over([slab.window(0, 4096)], CPU)
        copy_bytes(memory[10:13], torch.tensor([1, 2, 3], dtype=torch.uint8))
        del memory
        with slab.seal() as descriptor, MemfdBackend().map(descriptor, 4096) as mapping:
            tensors = over([mapping.window(10, 3), mapping.window(11, 2)], CPU)
            assert [tensor.tolist() for tensor in tensors] == [[1, 2, 3], [2, 3]]


def test_a_tensor_keeps_its_window() -> None:
    with MemfdBackend().create("test", 4096) as slab, slab.seal() as descriptor:
        mapping = MemfdBackend().map(descriptor, 4096)
    view = over([mapping.window(0, 8)], CPU)[0].view(torch.int64).reshape(1, 1)
    mapping.close()
    gc.collect()
    assert mapping.mapped
    assert view.item() == 0
    del view
    assert not mapping.mapped


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_are_compared_bit_for_bit_through_strides(dtype: str) -> None:
    item_bytes = DTYPES[dtype].itemsize
    memory = torch.arange(12 * item_bytes, dtype=torch.uint8)
    one = torch.empty(0, dtype=DTYPES[dtype]).set_(memory.untyped_storage(), 1, (2, 3), (5, 2))
    for byte in range(12 * item_bytes):
        changed = memory.clone()
        changed[byte] ^= 128
        other = torch.empty(0, dtype=DTYPES[dtype]).set_(changed.untyped_storage(), 1, (2, 3), (5, 2))
        shown = byte // item_bytes - 1 in (0, 2, 4, 5, 7, 9)
        assert same_bytes(one, other) == (not shown), byte


def test_bytes_are_those_of_the_storage_past_the_view() -> None:
    tensor = torch.arange(10, dtype=torch.int16)[4:6]
    assert bytes_of(tensor, 2, 4).tolist() == [1, 0, 2, 0]


def test_a_gpu_that_torch_does_not_see_is_an_error() -> None:
    with pytest.raises(HostError, match="torch sees no GPU GPU-0000"):
        torch_device("GPU-0000")


def test_every_dtype_of_torch_is_known_or_refused() -> None:
    named = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    assert named - quantized == set(DTYPES)
    assert all(
        torch.empty(0, dtype=dtype).element_size() == dtype.itemsize
        for dtype in DTYPES.values()
        if not dtype.is_complex
    )
