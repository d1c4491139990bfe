"""What only this process can follow is told from numbers that mean the same everywhere."""

import pytest
import torch
from torch import nn

from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.addresses import holds_addresses
from appliance.tensors.inventory import TensorError
from appliance.tensors.packing import pack


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_a_table_of_pointers_is_one(dtype: torch.dtype) -> None:
    blocks = torch.zeros(64), torch.zeros(64)
    pointers = [0, *(block.data_ptr() for block in blocks)]
    assert holds_addresses(torch.tensor(pointers, dtype=dtype))


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [0, 0],
        [1 << 30, 16],
        [(1 << 63) - 1],
        [-(1 << 46)],
        [(1 << 46) + 1],
        [1 << 46, 7],
        [0x7F65_9000_0000] * 70_000,
    ],
    ids=lambda numbers: str(numbers[:2]),
)
def test_counts_sizes_masks_and_seeds_are_none(numbers: list[int]) -> None:
    assert not holds_addresses(torch.tensor(numbers, dtype=torch.int64))
    assert not holds_addresses(torch.tensor(numbers, dtype=torch.float64))


def test_a_module_that_holds_one_is_not_packed_and_goes_on_as_it_is() -> None:
    module, buffer = nn.Linear(2, 2), torch.zeros(64)
    module.workspace = torch.tensor([0, buffer.data_ptr()])
    with pytest.raises(TensorError, match=r"workspace \(a table of addresses in this process\)"):
        pack(module, MemfdBackend())
    assert not module.weight.is_meta
