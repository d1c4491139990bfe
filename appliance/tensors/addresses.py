"""Numbers that may be addresses in this process: another one has something else there, or nothing."""

import torch

# Whatever is mapped by a library, or by a GPU's driver for one, lies above; counts and sizes lie below.
LIMIT = 1 << 40
# A process has 47 bits of addresses, if it asks for no more.
_END = 1 << 47

# What a kernel is given as pointers: each to memory that an allocator gave.
_ALIGNMENT = 16
_LIMIT_ELEMENTS = 1 << 16


def may_be_address(number: int) -> bool:
    """Tell whether a number is too large to be a count."""
    return abs(number) >= LIMIT


def holds_addresses(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor that has no `storage.problem` looks like a table of pointers, zero being none."""
    if tensor.dtype not in (torch.int64, torch.uint64) or not 0 < tensor.numel() <= _LIMIT_ELEMENTS:
        return False
    numbers = [number for number in tensor.detach().flatten().tolist() if number]
    return bool(numbers) and all(LIMIT <= number < _END and number % _ALIGNMENT == 0 for number in numbers)
