"""Tensors as bytes and bytes as tensors, nothing copied in either direction."""

import ctypes
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from appliance.errors import HostError
from appliance.layout import ITEM_BYTES, TensorSpec
from appliance.tensors.slot import SLOT_NAMES, slot_values

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
_CPU = torch.device("cpu")
storage_part: Callable[[torch.UntypedStorage, slice], torch.UntypedStorage] = vars(torch._C.StorageBase)["__getitem__"]
"""Return a storage over a part of another's bytes, which it keeps alive; past a Python method that asks for meta."""


def torch_device(device: str) -> torch.device:
    """Return torch's device for "cpu" or the UUID of a GPU, or part of one; HostError if torch does not see it."""
    if device == "cpu":
        return _CPU
    # GPU-... and MIG-... differ in the prefix, and torch tells the number alone.
    number = device.partition("-")[2]
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == number:
            return torch.device("cuda", index)
    raise HostError(f"torch sees no GPU {device}", hint="look at CUDA_VISIBLE_DEVICES of this process")


def over(windows: Iterable[object], device: torch.device) -> list[torch.Tensor]:
    """Return a tensor of bytes over each window of a slab, which lives as long as the tensor does."""
    if device.type == "cuda":
        return [torch.as_tensor(window, device=device) for window in windows]
    with warnings.catch_warnings():
        # It warns once of what is meant here: nobody may write through a read-only window.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return [torch.frombuffer(window, dtype=torch.uint8) for window in windows]


def bytes_of(tensor: torch.Tensor, start: int, size_bytes: int) -> torch.Tensor:
    """Return these bytes of the tensor's storage, as a tensor over them."""
    return _empty(torch.uint8, tensor.device).set_(tensor.untyped_storage(), start, (size_bytes,), (1,))


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy as many bytes as both have, both tensors of bytes."""
    if target.device.type == source.device.type == "cpu":
        # torch would wake a thread for each core, which on busy cores made this six times slower.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
    else:
        target.copy_(source)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether the elements are the same bit for bit, NaN and all; of one dtype, device and shape."""
    return one.numel() == 0 or torch.equal(_integers(one), _integers(other))


def problem(tensor: torch.Tensor) -> str | None:
    """Return why a tensor is more than bytes, shape and stride in memory, or None if it is not."""
    # A wrapper's own shape and storage are not those of the tensors inside.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}"
    if is_lazy(tensor):
        return "not initialized"
    if tensor.is_meta:
        return "on the meta device"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized or dtype_name(tensor.dtype) not in ITEM_BYTES:
        return dtype_name(tensor.dtype)
    return None


def spec_of(tensor: torch.Tensor, device: torch.device) -> TensorSpec:
    """Return the spec of a tensor that has no `problem`, for slabs on this device.

    The result of a computation with gradients (`is_leaf` false) is kept as a value: nothing leads back from it.
    """
    return TensorSpec(
        type_name=type_name(type(tensor)),
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        requires_grad=tensor.requires_grad and tensor.is_leaf,
        conjugated=tensor.is_conj(),
        negated=tensor.is_neg(),
        on_host=tensor.device != device,
    )


class Blanks:
    """Makes tensors over storages, from one without elements for each dtype and device: a start makes thousands."""

    def __init__(self) -> None:
        self._blanks: dict[tuple[str, torch.device], tuple[torch.Tensor, int]] = {}

    def tensor_in(self, memory: torch.UntypedStorage, spec: TensorSpec, offset_bytes: int) -> torch.Tensor:
        """Return a tensor over these bytes of a storage, of class `torch.Tensor` and without gradient."""
        key = spec.dtype, memory.device
        found = self._blanks.get(key)
        if found is None:
            dtype = DTYPES[spec.dtype]
            found = self._blanks[key] = _empty(dtype, memory.device), dtype.itemsize
        blank, item_bytes = found
        # `data` is a tensor of its own, and neither asks an allocator nor reads arguments, as `torch.empty` does.
        tensor = blank.data.set_(memory, offset_bytes // item_bytes, spec.shape, spec.stride)
        return _viewed(tensor, spec) if spec.conjugated or spec.negated else tensor


def empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return a tensor of this spec whose bytes are undefined, as those of `Blanks.tensor_in`."""
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=DTYPES[spec.dtype], device=device)
    return _viewed(tensor, spec)


def typed(tensor: torch.Tensor, kind: type[torch.Tensor], model: torch.Tensor | None, *, grad: bool) -> torch.Tensor:
    """Return a tensor without gradient as one of this class, with the model's attributes, the very dict for both."""
    if kind is nn.Parameter and type(tensor) is torch.Tensor:
        # As torch does with a lazy parameter that gets its shape; the other way makes a second tensor.
        tensor.__class__ = kind
        if grad:
            tensor.requires_grad = True
    elif kind is not torch.Tensor or grad:
        tensor = torch.Tensor._make_subclass(kind, tensor, grad)
    if model is not None:
        if model.__dict__:
            tensor.__dict__ = model.__dict__
        if SLOT_NAMES[kind]:
            for name, value in slot_values(model):
                object.__setattr__(tensor, name, value)
    return tensor


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The device is always named: the caller may have made another one the default.
    return torch.empty(0, dtype=dtype, device=device)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, over the same memory: not every dtype can be compared, and NaN is not itself."""
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    item_bytes = tensor.dtype.itemsize
    if item_bytes == 16:
        shape, stride, offset, item_bytes = (*shape, 2), (*(2 * step for step in stride), 1), 2 * offset, 8
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item_bytes]
    return _empty(dtype, tensor.device).set_(tensor.untyped_storage(), offset, shape, stride)


def _viewed(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if spec.conjugated:
        tensor = tensor.conj()
    if spec.negated:
        tensor = torch._neg_view(tensor)
    # Not a view in the eyes of autograd, as the original is none.
    return torch.Tensor._make_subclass(torch.Tensor, tensor, False)
