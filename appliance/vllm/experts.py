"""The kernels of quantized experts, made anew beside processed weights by methods that know of no such weights.

Such a kernel is an object of its process, and holds scales of its layer. In vLLM's own mode for processed weights some
methods make nothing but that; these have no such mode, or not for every kernel, but make it in the same way.
"""

import sys
from typing import Any

import torch

# These have a method that does this, and nothing else. Others lay weights out in one of the same name.
_BY_THEMSELVES = frozenset(
    {"AutoAWQMoEMethod", "AutoGPTQMoEMethod", "CompressedTensorsWNA16MoEMethod", "MoeWNA16Method"}
)

# These make it by this function, and tell it this attribute as that. Some have the kernel process weights then, which
# writes to where they lie, and is not to be done twice.
_MAKERS = {
    "CompressedTensorsW4A4Nvfp4MoEMethod": ("make_nvfp4_moe_kernel", "nvfp4_backend", "backend"),
    "CompressedTensorsW8A8Fp8MoEMethod": ("make_fp8_moe_kernel", "fp8_backend", "fp8_backend"),
    "CompressedTensorsW8A8Int8MoEMethod": ("make_int8_moe_kernel", "int8_backend", "int8_backend"),
    "GptOssMxfp4MoEMethod": ("make_mxfp4_moe_kernel", "mxfp4_backend", "mxfp4_backend"),
    "Mxfp4MoEMethod": ("make_mxfp4_moe_kernel", "mxfp4_backend", "mxfp4_backend"),
    "ModelOptNvFp4FusedMoE": ("make_nvfp4_moe_kernel", "nvfp4_backend", "backend"),
    "ModelOptFp8MoEMethod": ("make_fp8_moe_kernel", "fp8_backend", "fp8_backend"),
}

# These know of processed weights, but break off at any other kernel than this one, which is none for Hopper.
_BUT_FOR_ONE = {
    "ModelOptNvFp4FusedMoE": ("nvfp4_backend", "FLASHINFER_TRTLLM"),
    "Mxfp4MoEMethod": ("mxfp4_backend", "FLASHINFER_TRTLLM_MXFP4_MXFP8"),
}


def knows_of_processed_weights(method: object) -> bool:
    """Tell whether vLLM's own mode takes a layer with this method; what has no such flag is left out by it."""
    attribute, backend = _BUT_FOR_ONE.get(type(method).__name__, ("", ""))
    if attribute and getattr(getattr(method, attribute, None), "name", "") != backend:
        return False
    return bool(getattr(method, "supports_pre_processed_weights", True))


def experts_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of experts whose kernel can be made anew."""
    names = _BY_THEMSELVES | _MAKERS.keys()
    return [part for part in module.modules() if type(getattr(part, "quant_method", None)).__name__ in names]


def set_kernel_up(layer: Any) -> None:
    """Make the kernel of such a layer from the weights that it has."""
    method = layer.quant_method
    name = type(method).__name__
    if name in _BY_THEMSELVES:
        method._setup_kernel(layer)
        return
    function, attribute, keyword = _MAKERS[name]
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = vars(sys.modules[type(method).__module__])[function](
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        experts_cls=method.experts_cls,
        routing_tables=layer._expert_routing_tables(),
        **{keyword: getattr(method, attribute)},
    )
