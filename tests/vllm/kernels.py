"""In vLLM's environment: what another process gets of layers in fp8, and of whatever else is processed.

Layers, methods and kernels are vLLM's own for an H200. A kernel computes nothing here: it is asked what it makes of a
weight after loading, which is Python, but for two functions of the GPU that are replaced.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm import _custom_ops as operations
from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import (
    FlashInferFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8

from appliance.descriptors import close_all
from appliance.layout import shown
from appliance.record import Absence, Flag, Reference
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.attachment import confirm, place
from appliance.tensors.comparison import differences
from appliance.tensors.flags import flags_of, set_flags
from appliance.tensors.inventory import TensorError
from appliance.tensors.packing import pack
from appliance.vllm.processing import process_again
from appliance.vllm.source import VllmSource

IN_FEATURES, OUT_FEATURES = 256, 384
BLOCK = [128, 128]
NAMES = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
# What experts have, each by one of these names.
EXPERTS = ("w13_weight", "w13_qweight", "w13_weight_packed")
KERNELS = {
    "one scale a tensor": (CutlassFP8ScaledMMLinearKernel, None),
    "blocks": (deep_gemm.DeepGemmFp8BlockScaledMMKernel, BLOCK),
    "blocks, two kernels": (FlashInferFp8DeepGEMMDynamicBlockScaledKernel, BLOCK),
}


class Layer(nn.Module):
    """A linear layer with one of vLLM's methods for fp8."""

    def __init__(self, method: Any, scheme: Any = None) -> None:
        super().__init__()
        self.quant_method, self.scheme = method, scheme
        sizes = (IN_FEATURES, [OUT_FEATURES], IN_FEATURES, OUT_FEATURES)
        self.quant_method.create_weights(self, *sizes, torch.bfloat16, weight_loader=lambda tensor, read: None)


@contextmanager
def kernel_of_a_gpu(kind: Any) -> Iterator[None]:
    """Have layers get this kernel, as vLLM would choose it on a GPU that has it."""

    def chosen(*, activation_quant_key: Any, weight_quant_key: Any, **facts: Any) -> Any:
        facts.pop("module_name", None)
        config = FP8ScaledMMLinearLayerConfig(
            weight_quant_key=weight_quant_key, activation_quant_key=activation_quant_key, **facts
        )
        return kind(config, NAMES) if kind is CutlassFP8ScaledMMLinearKernel else kind(config)

    supported = classmethod(lambda kernel, *facts: (True, None))
    kinds = (kind, deep_gemm.DeepGemmFp8BlockScaledMMKernel, FlashInferFp8BlockScaledMMKernel)
    with ExitStack() as stack:
        for one in kinds:
            stack.enter_context(patch.object(one, "is_supported", supported))
            stack.enter_context(patch.object(one, "can_implement", supported))
        for module in (fp8, compressed_tensors_w8a8_fp8):
            stack.enter_context(patch.object(module, "init_fp8_linear_kernel", chosen))
        stack.enter_context(patch.object(deep_gemm, "is_deep_gemm_supported", lambda: True))
        stack.enter_context(patch.object(deep_gemm, "deepgemm_post_process_fp8_weight_block", _as_they_are))
        stack.enter_context(patch.object(operations, "scaled_fp8_quant", _quantized))
        yield


def attached(kind: Any, block: list[int] | None) -> dict[str, Any]:
    """Return what another process gets of a linear layer with this kernel."""

    def built(device: str) -> nn.Module:
        """Return a new layer, as one that has been loaded where it is not on the meta device."""
        config = fp8.Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=block)
        with torch.device(device):
            return nn.Sequential(Layer(fp8.Fp8LinearMethod(config)))

    with kernel_of_a_gpu(kind):
        return compared(built)


def attached_compressed() -> dict[str, Any]:
    """Return the same of a layer of compressed-tensors with a scale for each channel, which vLLM does not rebuild."""
    weights = compressed_tensors_w8a8_fp8.QuantizationArgs(
        num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False
    )

    def built(device: str) -> nn.Module:
        with torch.device(device):
            scheme = compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8(weights, is_static_input_scheme=False)
            return nn.Sequential(Layer(CompressedTensorsLinearMethod(None), scheme))

    with kernel_of_a_gpu(CutlassFP8ScaledMMLinearKernel):
        return compared(built)


def compared(built: Callable[[str], nn.Module]) -> dict[str, Any]:
    """Return what comes along with a processed module, and how another process's one differs from it."""
    opaque, unused = VllmSource.opaque, VllmSource.unused
    loaded, other, bare = built("cpu"), built("meta"), built("meta")
    for parameter in loaded.parameters():
        parameter.data = torch.ones(parameter.shape).to(parameter.dtype)
    _process(loaded)
    flags = flags_of(loaded, built("meta"), inner=True, opaque=opaque)
    packed = pack(loaded, MemfdBackend(), opaque=opaque)
    mappings = MemfdBackend().map_all(packed.slabs, packed.layout.slab_sizes)
    awaited = {
        module: place(module, packed.layout, stage="processed", rebuilds=True, opaque=opaque).bind(mappings)
        for module in (loaded, other, bare)
    }
    close_all(packed.slabs)
    with suppress(TensorError):  # it may look for what a flag says
        process_again(bare, _process, opaque=opaque)
    set_flags(other, flags, inner=False, opaque=opaque)
    process_again(other, _process, opaque=opaque)
    set_flags(other, flags, inner=True, opaque=opaque)
    confirm(other, awaited[other], opaque=opaque)
    return {
        "flags": [_shown(flag) for flag in flags],
        "rebuilt": [shown(path) for path, _ in awaited[other]],
        "left": differences(loaded, other, opaque=opaque, unused=unused),
        "left by vLLM alone": differences(loaded, bare, opaque=opaque, unused=unused),
    }


def _process(module: Any) -> None:
    """Process what is quantized here, as vLLM's own function does; the rest would be packed for a CPU."""
    for part in module.modules():
        if isinstance(part, Layer) or any(hasattr(part, name) for name in EXPERTS):
            part.quant_method.process_weights_after_loading(part)


def _shown(flag: Flag) -> list[Any]:
    value = f"as {flag.value.place}" if isinstance(flag.value, Reference) else flag.value
    return [flag.place, flag.name, "absent" if isinstance(value, Absence) else value]


def _as_they_are(*, wq: torch.Tensor, ws: torch.Tensor, **facts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return wq.clone(), ws.clone()


def _quantized(values: torch.Tensor, scale: Any = None, **facts: Any) -> tuple[torch.Tensor, Any]:
    return values.to(torch.float8_e4m3fn), scale
