"""A packed module, mapped, and a small model to pack and to attach to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from appliance.descriptors import close_all
from appliance.layout import Layout
from appliance.slabs.interface import Mapping
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.attachment import attach
from appliance.tensors.homes import Stage
from appliance.tensors.packing import Packed, pack
from tests.tensors.modules import Box, Helper, mapped


class Shard:
    """A packed module, mapped."""

    def __init__(self, module: nn.Module) -> None:
        self.packed: Packed = pack(module, MemfdBackend())
        self.layout: Layout = self.packed.layout
        self.mappings: list[Mapping] = mapped(self.packed)
        close_all(self.packed.slabs)

    def attach(self, module: Any, *, stage: Stage = "loaded", copy: bool = False) -> Any:
        attach(module, self.layout, self.mappings, stage=stage, copy=copy)
        return module

    def close(self) -> None:
        for mapping in self.mappings:
            mapping.close()

    @property
    def mapped(self) -> bool:
        return any(mapping.mapped for mapping in self.mappings)


MakeShard = Callable[[nn.Module], Shard]


def small_model(*, tied: bool = True, device: str = "cpu") -> Any:
    """Return a small model as they are: a tied head, a non-persistent buffer, a helper with a scale."""
    with torch.device(device):
        model = Box()
        model.embed = nn.Embedding(4, 3)
        model.head = nn.Linear(3, 4, bias=False)
        model.register_buffer("frequencies", torch.rand(5), persistent=False)
        model.method = Helper()
        model.method.scale = torch.rand(())
        if tied:
            model.head.weight = model.embed.weight
    return model


def small_skeleton(**options: Any) -> Any:
    """Return the same model without data."""
    return small_model(device="meta", **options)


def buffer_as_attribute(model: Any) -> None:
    """Hold the small model's buffer as a plain attribute instead."""
    buffer = model.frequencies
    del model.frequencies
    model.frequencies = buffer
