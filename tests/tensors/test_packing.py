"""Packing: what goes into slabs and how, what is refused, and what is left when it fails."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from appliance.descriptors import Descriptor
from appliance.errors import ResourceError
from appliance.layout import ALIGNMENT_BYTES
from appliance.slabs.interface import LIMIT_SLABS, Mapping, Slab
from appliance.slabs.memfd import MemfdBackend, MemfdMapping, MemfdSlab
from appliance.tensors.attachment import attach
from appliance.tensors.comparison import differences
from appliance.tensors.inventory import TensorError, walk
from appliance.tensors.packing import Packed, pack
from tests.descriptors import count_descriptors
from tests.tensors.modules import Box, Helper, mapped

REPOSITORY = Path(__file__).resolve().parents[2]


class LimitedBackend(MemfdBackend):
    """Memory that is full after so many slabs."""

    def __init__(self, slabs: int, error: BaseException) -> None:
        self.left, self.error = slabs, error

    def create(self, name: str, size_bytes: int) -> MemfdSlab:
        if self.left == 0:
            raise self.error
        self.left -= 1
        return super().create(name, size_bytes)


def _linears(*, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))  # 4 KiB each


def _attached(packed: Packed, module: nn.Module) -> nn.Module:
    mappings = mapped(packed)
    attach(module, packed.layout, mappings)
    for mapping in mappings:
        mapping.close()
    packed.close()
    return module


def _flat(size_bytes: int, *sizes: int) -> list[torch.Tensor]:
    """Return tensors that lie one after the other in one storage."""
    storage = torch.arange(size_bytes, dtype=torch.int64).to(torch.uint8)
    ends = list(accumulate(sizes))
    return [storage[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class Wrapped(torch.Tensor):
    """A tensor made of others, as quantization libraries have them."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*args, **(kwargs or {}))


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.ones(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "_mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a Wrapped": lambda: torch.Tensor._make_subclass(Wrapped, torch.ones(3)),
    "on the meta device": lambda: torch.ones(3, device="meta"),
    "not initialized": UninitializedParameter,
}


@pytest.mark.filterwarnings("ignore")  # torch warns of half of these
@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_more_than_bytes_is_refused_by_name_and_nothing_is_moved(reason: str) -> None:
    module = _linears()
    module.inner = Box()
    module.inner.held = [REFUSED[reason]()]
    before = count_descriptors()
    with pytest.raises(TensorError, match=rf"inner\.held\[0\] \({reason}\)"):
        pack(module, MemfdBackend())
    assert count_descriptors() == before
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert module[0].weight.shape == (32, 32)


def test_the_first_few_refused_tensors_are_named() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False, device="meta") for _ in range(9)))
    with pytest.raises(TensorError, match=r"^tensors .*: 0\.weight \(on the meta device\), 1\.weight .* and 4 more$"):
        pack(module, MemfdBackend())


def test_a_name_that_no_layout_can_say_is_refused_before_anything_is_moved() -> None:
    module = Box()
    module.inner = nn.Linear(2, 2)
    setattr(module, "a\nb", torch.ones(1))
    with pytest.raises(TensorError, match="step is neither printable"):
        pack(module, MemfdBackend())
    assert not module.inner.weight.is_meta


def test_a_module_is_packed_once() -> None:
    module = _linears()
    packed = pack(module, MemfdBackend())
    with pytest.raises(TensorError, match="on the meta device"):
        pack(module, MemfdBackend())
    packed.close()


def test_a_module_without_tensors_needs_no_slab() -> None:
    packed = pack(Box(), MemfdBackend())
    assert (packed.slabs, packed.layout.entries) == ([], ())
    _attached(packed, Box())


def test_what_is_left_is_a_skeleton_of_the_same_objects_classes_and_attributes() -> None:
    module: Any = _linears(layers=1)
    module[0].weight.weight_loader = module.forward
    module[0].weight.requires_grad_(False)
    held = module[0].weight
    pack(module, MemfdBackend()).close()
    left = module[0].weight
    assert left.is_meta
    assert (type(left), left.shape, left.requires_grad) == (nn.Parameter, (32, 32), False)
    assert left.weight_loader == module.forward
    # Whoever holds the old object does not hold its memory.
    assert held.untyped_storage().nbytes() == 0


def test_a_full_memory_at_the_first_slab_leaves_the_module_as_it_was() -> None:
    module, same = _linears(), _linears()
    before = count_descriptors()
    with pytest.raises(ResourceError, match="full"):
        pack(module, LimitedBackend(0, ResourceError("full")), slab_bytes=4096)
    assert count_descriptors() == before
    assert differences(module, same) == []


@pytest.mark.parametrize("error", [ResourceError("full"), KeyboardInterrupt("full")], ids=["full", "interrupted"])
@pytest.mark.parametrize("slabs", [1, 2, 3])
def test_a_failure_on_the_way_leaves_no_slab_and_no_half_filled_module(slabs: int, error: BaseException) -> None:
    module = _linears()
    before = count_descriptors()
    with pytest.raises(type(error), match="full"):
        pack(module, LimitedBackend(slabs, error), slab_bytes=4096)
    assert count_descriptors() == before
    assert all(parameter.is_meta for parameter in module.parameters())


def test_slabs_are_filled_one_after_the_other() -> None:
    module, original = _linears(layers=5), _linears(layers=5)
    packed = pack(module, MemfdBackend(), slab_bytes=8192)
    assert packed.layout.slab_sizes == (8192, 8192, 4096)
    assert differences(_attached(packed, module), original) == []


def test_a_tensor_larger_than_a_slab_has_one_of_its_own() -> None:
    module = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(32, 32, bias=False))
    packed = pack(module, MemfdBackend(), slab_bytes=4096)
    assert packed.layout.slab_sizes == (4096, 16384, 4096)
    packed.close()


def test_a_shard_of_many_awkward_tensors_needs_no_more_slabs_than_allowed() -> None:
    class SmallSlabs(MemfdBackend):
        default_slab_bytes = 4096

    module = nn.Sequential(*(nn.Linear(2100, 1, bias=False) for _ in range(500)))  # two do not fit in a default slab
    packed = pack(module, SmallSlabs())
    assert 1 < len(packed.slabs) <= LIMIT_SLABS
    packed.close()


def test_bytes_are_stored_once_however_many_tensors_show_them() -> None:
    module = Box()
    module.weight = nn.Parameter(torch.rand(64, 64))
    module.again, module.transposed, module.rows = module.weight, module.weight.data.T, list(module.weight.data)
    module.integers = module.weight.data.view(torch.int16)
    packed = pack(module, MemfdBackend())
    assert [region.size_bytes for region in packed.layout.regions] == [64 * 64 * 4]
    assert len(packed.layout.entries) == 4 + 64
    packed.close()


def test_only_the_bytes_that_are_shown_are_stored() -> None:
    module = Box()
    module.pieces = [torch.rand(1 << 20)[start : start + 10] for start in (0, 1000, 900_000)]
    module.two = [piece for whole in [torch.rand(1 << 20)] for piece in (whole[:10], whole[500_000:500_010])]
    packed = pack(module, MemfdBackend())
    assert len(packed.layout.regions) == 5
    assert sum(region.size_bytes for region in packed.layout.regions) < 5 * ALIGNMENT_BYTES
    packed.close()


def test_a_storage_stays_in_one_piece_where_it_fits_in_a_slab() -> None:
    module = Box()
    module.parts = _flat(8192, 1000, 1000, 2000)
    packed = pack(module, MemfdBackend(), slab_bytes=4096)
    assert [region.size_bytes for region in packed.layout.regions] == [4000]
    _attached(packed, module)
    assert len({part.untyped_storage().data_ptr() for part in module.parts}) == 1


def test_a_storage_larger_than_a_slab_is_cut_where_no_tensor_is() -> None:
    module = Box()
    module.parts = _flat(32768, 4000, 4000, 4000, 4000)
    expected = [part.clone() for part in module.parts]
    packed = pack(module, MemfdBackend(), slab_bytes=4096)
    assert len(packed.slabs) == len(packed.layout.regions) == 4
    _attached(packed, module)
    assert all(map(torch.equal, module.parts, expected))


def test_storages_over_the_same_memory_are_packed_as_one() -> None:
    memory = bytearray(os.urandom(4096))
    module = Box()
    module.one = torch.frombuffer(memory, dtype=torch.uint8, count=2048)
    module.other = torch.frombuffer(memory, dtype=torch.int64, offset=1024)
    expected = module.other.clone()
    packed = pack(module, MemfdBackend())
    assert len(packed.layout.regions) == 1
    _attached(packed, module)
    assert torch.equal(module.other, expected)
    module.one[1024:1032] = 0
    assert module.other[0] == 0


def test_storages_side_by_side_are_packed_apart() -> None:
    memory = bytearray(os.urandom(2048))
    module = Box()
    module.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.uint8, count=1024), requires_grad=False)
    module.register_buffer("scale", torch.frombuffer(memory, dtype=torch.uint8, offset=1024))
    packed = pack(module, MemfdBackend())
    assert [(region.size_bytes, region.shared) for region in packed.layout.regions] == [(1024, True), (1024, False)]
    packed.close()


def test_memory_shared_out_of_step_is_refused() -> None:
    memory = bytearray(4096)
    module = Box()
    module.one = torch.frombuffer(memory, dtype=torch.uint8)
    module.other = torch.frombuffer(memory, dtype=torch.int64, offset=3, count=8)
    with pytest.raises(TensorError, match="multiple of its element"):
        pack(module, MemfdBackend())


def test_alignment_in_a_storage_is_kept() -> None:
    module = Box()
    module.piece = torch.rand(1000)[130:140]  # 520 bytes in
    packed = pack(module, MemfdBackend())
    assert packed.layout.entries[0].offset_bytes == 520 % ALIGNMENT_BYTES
    packed.close()


def test_what_shares_memory_with_a_parameter_is_shared_and_nothing_else_is() -> None:
    module = Box()
    module.weight = nn.Parameter(torch.rand(8))
    module.register_buffer("part", module.weight.data[:4])
    module.register_buffer("scale", torch.rand(8))
    module.held = [nn.Parameter(torch.rand(8)), torch.rand(8)]
    packed = pack(module, MemfdBackend())
    regions = packed.layout.regions
    shared = {entry.name: regions[entry.region].shared for entry in packed.layout.entries if entry.region is not None}
    assert shared == {"weight": True, "part": True, "scale": False, "held[0]": True, "held[1]": False}
    packed.close()


def test_surroundings_of_the_caller_do_not_matter() -> None:
    module: nn.Module = _linears()
    original = _linears()
    with torch.inference_mode():
        module.register_buffer("made", torch.ones(3))
    original.register_buffer("made", torch.ones(3))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            packed = pack(module, MemfdBackend())
            _attached(packed, module)
    finally:
        torch.set_default_dtype(torch.float32)
    assert differences(module, original) == []
    assert not any(slot.value.is_inference() for slot in walk(module).slots.values())
    module(torch.ones(1, 32)).sum().backward()


def test_gradients_and_what_led_to_a_tensor_are_dropped() -> None:
    module = Box()
    module.weight = nn.Parameter(torch.ones(2))
    module.computed = module.weight * 2
    module.computed.sum().backward()
    packed = pack(module, MemfdBackend())
    _attached(packed, module)
    assert module.weight.grad is None
    assert module.weight.requires_grad
    assert module.computed.grad_fn is None
    assert not module.computed.requires_grad
    assert module.computed.tolist() == [2, 2]


def test_an_opaque_helper_keeps_its_tensors() -> None:
    module: Any = _linears(layers=1)
    module.helper = helper = Helper()
    helper.workspace = torch.ones(3)
    packed = pack(module, MemfdBackend(), opaque=[Helper])
    assert [entry.name for entry in packed.layout.entries] == ["0.weight"]
    assert helper.workspace.tolist() == [1, 1, 1]
    packed.close()


MEASUREMENT = """
import re, sys
import torch
from torch import nn
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.packing import pack

WEIGHTS, SLAB = 256 << 20, 16 << 20
made = peak = 0

def resident():
    # Slabs count as made, mapped or not: their pages are there.
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024 + made

class Measured(MemfdBackend):
    def create(self, name, size_bytes):
        global made, peak
        slab = super().create(name, size_bytes)
        made += size_bytes
        peak = max(peak, resident())
        sealed = slab.seal
        def seal():
            global peak
            peak = max(peak, resident())
            return sealed()
        slab.seal = seal
        return slab

before = resident()
# A freed buffer of this size makes the allocator keep all that is smaller, instead of mapping and unmapping it.
torch.ones(31 << 20, dtype=torch.uint8)
sizes = [100_000, 3 << 20, 1 << 20, 300_000]
parameters, total = [], 0
while total < WEIGHTS:
    parameters.append(nn.Parameter(torch.ones(sizes[len(parameters) % 4], dtype=torch.uint8), requires_grad=False))
    total += parameters[-1].numel()
module = nn.ParameterList(parameters)
del parameters
packed = pack(module, Measured(), slab_bytes=SLAB)
print((max(peak, resident()) - before - total - SLAB) / total)
"""


def test_packing_takes_the_memory_of_one_slab_beside_the_weights() -> None:
    # A process of its own: what others freed before would hide what this one takes.
    measured = subprocess.run(
        [sys.executable, "-c", MEASUREMENT], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120
    )
    assert measured.returncode == 0, measured.stderr
    assert float(measured.stdout) < 0.1


def _satisfies(slab: MemfdSlab, mapping: MemfdMapping, descriptor: Descriptor) -> tuple[Slab, Mapping]:
    """Never called: the type checker compares the classes with the protocols."""
    return slab, mapping
