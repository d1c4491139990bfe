"""Tensors that stay on their device while transformers builds a model of them.

Without a device map, which wants another package and takes the weights' memory a second time, transformers moves every
tensor to host memory as it takes it. These it cannot move; what it makes of them, merged experts say, is made where
they are.
"""

from typing import Any

import torch
from torch import nn


class InPlaceTensor(torch.Tensor):
    """A tensor whose `to` changes its dtype, and never its device. Results of operations on it are such tensors too."""

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        dtype = options.get("dtype") or next((one for one in args if isinstance(one, torch.dtype)), self.dtype)
        return super().to(dtype)


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device as one that stays there, over the same memory; one in host memory as it is."""
    return tensor if tensor.device.type == "cpu" else tensor.as_subclass(InPlaceTensor)


def make_plain(module: nn.Module) -> None:
    """Put plain tensors, over the same memory, in the place of those that stay; ties are kept."""
    plain: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for names in (part._parameters, part._buffers):
            for name, tensor in names.items():
                if isinstance(tensor, InPlaceTensor):
                    names[name] = plain.setdefault(id(tensor), _plain(tensor))  # type: ignore[assignment]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    bare = tensor.detach().as_subclass(torch.Tensor)
    return nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
