"""A module with as many tensors and bytes as asked for, shaped like a decoder: layers of eight linear weights."""

import torch
from torch import nn

_PARTS = ("q", "k", "v", "o", "gate", "up", "down", "router")


class Layer(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        for part in _PARTS:
            self.add_module(part, nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))


class Model(nn.Module):
    """`tensors` weights of equal size, in all about `size_bytes`, and one small buffer."""

    def __init__(self, tensors: int, size_bytes: int) -> None:
        super().__init__()
        elements = size_bytes // tensors // 2
        rows = 1 << max(0, elements.bit_length() // 2)
        self.layers = nn.ModuleList([Layer(rows, elements // rows) for _ in range(tensors // len(_PARTS))])
        self.register_buffer("scale", torch.ones(64))


def skeleton(tensors: int, size_bytes: int) -> Model:
    """Return the module on the meta device."""
    with torch.device("meta"):
        return Model(tensors, size_bytes)


def random_model(tensors: int, size_bytes: int, device: torch.device, *, seed: int) -> Model:
    """Return the module on a device, every bit of its weights random."""
    model = skeleton(tensors, size_bytes).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(torch.int16).random_(-(2**15), 2**15, generator=generator)
        model.get_buffer("scale").fill_(1)
    return model.requires_grad_(False)
