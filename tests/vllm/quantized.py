"""Turns a checkpoint's linear layers into those of a quantization method, with packed values of a seeded generator.

What they stand for is of no account: vLLM has to load, repack and compute with them, twice in the same way.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 128  # of 4-bit weights, in values along the input
BLOCK = 128  # of fp8 weights, in values along each side
Tensors = dict[str, torch.Tensor]


def quantize(directory: Path, method: str) -> Path:
    """Rewrite the checkpoint in place; return it."""
    config_path = directory / "config.json"
    config: dict[str, Any] = json.loads(config_path.read_text())
    generator = torch.Generator().manual_seed(11)
    gates: list[str] = []
    for path in sorted(directory.glob("*.safetensors")):
        tensors: Tensors = {}
        for name, tensor in load_file(path).items():
            if _is_linear(name, tensor):
                tensors |= METHODS[method](name.removesuffix(".weight"), tensor, generator)
            else:
                tensors[name] = tensor
                gates += [name.removesuffix(".weight")] if name.endswith(".gate.weight") else []
        save_file(tensors, path, metadata={"format": "pt"})
    # Published checkpoints keep their routers as they are, too, and have to say so.
    key = UNQUANTIZED.get(method)
    quantization = CONFIGS[method]
    config["quantization_config"] = {**quantization, key: [*quantization.get(key, []), *gates]} if key else quantization
    config_path.write_text(json.dumps(config))
    index = directory / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    return directory


def _is_linear(name: str, tensor: torch.Tensor) -> bool:
    parts = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    return tensor.dim() == 2 and name.endswith(parts) and "kv_b_proj" not in name


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _fp8_tensor(name: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    scale = weight.float().abs().max() / 448
    return {f"{name}.weight": _fp8(weight, scale), f"{name}.weight_scale": scale.reshape(())}


def _fp8_block(name: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.empty(rows, columns)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            part = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = weight[part].float().abs().max() / 448
            quantized[part] = _fp8(weight[part], scales[row, column])
    return {f"{name}.weight": quantized, f"{name}.weight_scale_inv": scales}


def _fp8_channel(name: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 448
    return {f"{name}.weight": _fp8(weight, scale), f"{name}.weight_scale": scale.to(torch.bfloat16)}


def _int8_channel(name: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    quantized = (weight.float() / scale).round().clamp(-128, 127).to(torch.int8)
    return {f"{name}.weight": quantized, f"{name}.weight_scale": scale.to(torch.bfloat16)}


def _words(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64, generator=generator).to(torch.int32)


def _scales(outputs: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(inputs // GROUP, outputs, generator=generator) * 0.02 + 0.01).to(torch.float16)


def _awq(name: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    outputs, inputs = weight.shape
    return {
        f"{name}.qweight": _words(inputs, outputs // 8, generator=generator),
        f"{name}.qzeros": _words(inputs // GROUP, outputs // 8, generator=generator),
        f"{name}.scales": _scales(outputs, inputs, generator),
    }


def _gptq(name: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    outputs, inputs = weight.shape
    return {
        f"{name}.qweight": _words(inputs // 8, outputs, generator=generator),
        f"{name}.qzeros": torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
        f"{name}.scales": _scales(outputs, inputs, generator),
        f"{name}.g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
    }


def _group(bits: int, kind: str, *, dynamic: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": bits, "type": kind, "strategy": "token", "symmetric": True, "dynamic": dynamic}
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs}


METHODS: dict[str, Callable[[str, torch.Tensor, torch.Generator], Tensors]] = {
    "fp8": _fp8_tensor,
    "fp8-block": _fp8_block,
    "compressed-tensors-fp8": _fp8_channel,
    "compressed-tensors-int8": _int8_channel,
    "awq": _awq,
    "gptq": _gptq,
}
# What lists the layers that are not quantized.
UNQUANTIZED = {
    "fp8": "modules_to_not_convert",
    "fp8-block": "modules_to_not_convert",
    "compressed-tensors-fp8": "ignore",
    "compressed-tensors-int8": "ignore",
    "awq": "modules_to_not_convert",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    "compressed-tensors-fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": _group(8, "float", dynamic=True)},
    },
    "compressed-tensors-int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": _group(8, "int", dynamic=True)},
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}
