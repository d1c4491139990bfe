"""How large slabs are: large enough that a shard needs few."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.slabs.interface import LIMIT_SLABS, rounded_up, slab_bytes
from appliance.slabs.memfd import MemfdBackend


@given(st.integers(0, 2**32), st.integers(1, 2**50))
def test_a_shard_of_any_size_needs_no_more_slabs_than_allowed(seed: int, total_bytes: int) -> None:
    backend = MemfdBackend()
    size_bytes = slab_bytes(backend, total_bytes)
    assert size_bytes >= backend.default_slab_bytes
    assert size_bytes % backend.granularity_bytes == 0
    assert _slabs(_parts(random.Random(seed), total_bytes, size_bytes), size_bytes) <= LIMIT_SLABS


def test_a_small_shard_has_slabs_of_the_default_size() -> None:
    assert slab_bytes(MemfdBackend(), 1 << 30) == MemfdBackend.default_slab_bytes


@pytest.mark.parametrize(("size", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_rounding_is_up(size: int, rounded: int) -> None:
    assert rounded_up(size, 4096) == rounded


def _parts(chance: random.Random, total_bytes: int, size_bytes: int) -> list[int]:
    """Split a total; the worst splits are just above half a slab, and a small one beside a whole one."""
    parts: list[int] = []
    while total_bytes > 0 and len(parts) < 1000:
        part = chance.choice([size_bytes // 2 + 1, size_bytes, 1, chance.randint(1, size_bytes)])
        parts.append(min(part, total_bytes))
        total_bytes -= parts[-1]
    return parts


def _slabs(parts: list[int], size_bytes: int) -> int:
    slabs, used = 0, size_bytes
    for part in parts:
        if used + part > size_bytes:
            slabs, used = slabs + 1, 0
        used += part
    return slabs
