"""The kernels of quantized experts, made anew beside processed weights by methods that know of no such weights.

Such a kernel is an object of its process, and holds scales of its layer. In vLLM's own mode for processed weights some
methods make nothing but that; these have no such mode, but make it in the same way.
"""

import sys
from typing import Any

import torch

# These have a method that does this, and nothing else. Others lay weights out in one of this name.
_BY_THEMSELVES = frozenset(
    {"AutoAWQMoEMethod", "AutoGPTQMoEMethod", "CompressedTensorsWNA16MoEMethod", "MoeWNA16Method"}
)

# These end their post-processing with it: by which function, and what they tell it of themselves.
_MAKERS = {
    "CompressedTensorsW8A8Fp8MoEMethod": ("make_fp8_moe_kernel", "fp8_backend"),
    "CompressedTensorsW8A8Int8MoEMethod": ("make_int8_moe_kernel", "int8_backend"),
}


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
    function, backend = _MAKERS[name]
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = vars(sys.modules[type(method).__module__])[function](
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        experts_cls=method.experts_cls,
        routing_tables=layer._expert_routing_tables(),
        **{backend: getattr(method, backend)},
    )
