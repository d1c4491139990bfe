"""`python -m tests.vllm.mixtures FOLDER`, in vLLM's environment: what other processes get of quantized layers, in JSON.

Beside layers the experts of mixtures, each with vLLM's own method for them and one of its kernels for an H200.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm import _custom_ops as operations
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_kernels
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, modelopt, mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_fp8,
    compressed_tensors_moe_w8a8_int8,
    compressed_tensors_moe_wna16,
)

from appliance.ports import free_port
from appliance.vllm.loading import engine_config
from appliance.vllm.source import VllmSource
from tests.vllm.checkpoints import make_checkpoint
from tests.vllm.kernels import KERNELS, attached, attached_compressed, compared, kernel_of_a_gpu

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": None, "ignore": ["lm_head", "*mlp.gate"]}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    ignore = ["re:.*mlp.gate$", "lm_head"]
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ignore, "config_groups": groups}


# How their checkpoints are quantized, or say that they are: no kernel is asked about a value.
MIXTURES: dict[str, dict[str, Any] | None] = {
    **dict.fromkeys(("fp8", "fp8-block", "awq", "gptq", "compressed-tensors-fp8", "compressed-tensors-int8")),
    "compressed-tensors-int4": _compressed("pack-quantized", _INT4, None),
    "compressed-tensors-nvfp4": _compressed(
        "nvfp4-pack-quantized", _NVFP4 | {"dynamic": False}, _NVFP4 | {"dynamic": "local"}
    ),
    "modelopt-fp8": _MODELOPT | {"quant_algo": "FP8"},
    "modelopt-nvfp4": _MODELOPT | {"quant_algo": "NVFP4", "group_size": 16},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    "gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": []},
}
# What chooses a kernel for experts, where it is called, and what it is to choose.
CHOICES: list[tuple[str, tuple[Any, ...], tuple[Any, Any]]] = [
    (
        "select_fp8_moe_backend",
        (fp8, modelopt, compressed_tensors_moe_w8a8_fp8),
        (Fp8MoeBackend.TRITON, TritonExperts),
    ),
    ("select_int8_moe_backend", (compressed_tensors_moe_w8a8_int8,), (Int8MoeBackend.TRITON, TritonExperts)),
    (
        "select_wna16_moe_backend",
        (auto_awq, auto_gptq, compressed_tensors_moe_wna16),
        (WNA16MoEBackend.MARLIN, MarlinExperts),
    ),
    (
        "select_nvfp4_moe_backend",
        (modelopt, compressed_tensors_moe_w4a4_nvfp4),
        (NvFp4MoeBackend.MARLIN, MarlinExperts),
    ),
    ("select_mxfp4_moe_backend", (mxfp4,), (Mxfp4MoeBackend.MARLIN, MarlinExperts)),
    ("select_deepseek_v4_mxfp4_moe_backend", (mxfp4,), (Mxfp4MoeBackend.MARLIN, MarlinExperts)),
]
REPACKS = ["awq_marlin_moe_repack", "gptq_marlin_moe_repack", "gptq_marlin_repack"]


def experts(folder: Path, name: str) -> dict[str, Any]:
    """Return what another process gets of the experts of a mixture."""
    said, kind = MIXTURES[name], "gpt-oss" if name == "gpt-oss" else "qwen3-moe"
    checkpoint = make_checkpoint(folder / name, architecture=kind, method=None if said else name, large=True)
    if said:
        path = checkpoint / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    config = engine_config([str(checkpoint), "--max-model-len", "256", "--enforce-eager"])
    with set_current_vllm_config(config), _experts_of_a_gpu(config.quant_config):
        source = VllmSource(config, config.model_config, prefix="", target=None)
        return compared(lambda device: source._built(torch.device(device)))


@contextmanager
def _experts_of_a_gpu(quantization: Any) -> Iterator[None]:
    """Have experts get their kernel; other layers are as they are where a CPU has none for them."""
    of_layer = type(quantization).get_quant_method

    def chosen(itself: Any, layer: Any, prefix: str) -> Any:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else of_layer(itself, layer, prefix)

    with ExitStack() as stack:
        stack.enter_context(kernel_of_a_gpu(deep_gemm.DeepGemmFp8BlockScaledMMKernel))
        stack.enter_context(patch.object(type(quantization), "get_quant_method", chosen))
        for function, places, choice in CHOICES:
            for place in places:
                if hasattr(place, function):
                    stack.enter_context(patch.object(place, function, lambda *asked, to=choice, **facts: to))
        stack.enter_context(patch.object(mxfp4_kernels, "_validate_mxfp4_experts_config", _nothing, create=True))
        for repack in REPACKS:
            stack.enter_context(patch.object(operations, repack, _repacked))
        yield


def _nothing(*asked: object) -> None:
    """Ask no GPU what it can do."""


def _repacked(b_q_weight: torch.Tensor, *facts: Any, **named_facts: Any) -> torch.Tensor:
    *experts, rows, _ = b_q_weight.shape
    return b_q_weight.reshape(*experts, rows // 2, -1).clone()


def main() -> None:
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16)
        torch.set_default_dtype(torch.bfloat16)
        said = {name: attached(*kernel) for name, kernel in KERNELS.items()}
        said["compressed-tensors"] = attached_compressed()
    said |= {f"experts, {name}": experts(Path(sys.argv[1]), name) for name in MIXTURES}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
