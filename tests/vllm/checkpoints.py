"""Makes checkpoints that vLLM serves on a CPU: its attention kernels there want heads of 32 or more."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine import checkpoints
from tests.vllm.quantized import quantize

CONTEXT_TOKENS = checkpoints.CONTEXT_TOKENS
SMALL: dict[str, Any] = checkpoints.SMALL | {"hidden_size": 128, "head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# The latent cache of DeepSeek: vLLM decodes no other on a CPU.
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
# One of each kind of trap: ties, fused projections, experts, latent attention, a router's bias, sliding windows.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SMALL),
    "qwen3-moe": ("qwen3_moe", SMALL | EXPERTS | {"num_experts": 4}),
    "mixtral": ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("mistral", SMALL | {"sliding_window": 64}),
    # Small: its embeddings are scaled, and would drown what the layers say.
    "gemma3": (
        "gemma3_text",
        SMALL | {"sliding_window": 64, "tie_word_embeddings": True, "initializer_range": 0.02},
    ),
    "phi3": ("phi3", SMALL),
    "deepseek-v3": (
        "deepseek_v3",
        SMALL
        | EXPERTS
        | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    # No low-rank queries, and a router that chooses greedily, by softmax.
    "deepseek-v2": (
        "deepseek_v2",
        SMALL
        | EXPERTS
        | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "q_lora_rank": None}
        | {"topk_method": "greedy", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "gpt-oss": ("gpt_oss", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}),
}


# What the kernels of a GPU want: heads of 128, latent attention as large as DeepSeek's, sides of 128 and its multiples.
LARGER: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "initializer_range": 0.1}
LARGER_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256}
LARGER_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def make_checkpoint(
    directory: Path, *, architecture: str = "llama", method: str | None = None, large: bool = False
) -> Path:
    """Write a bf16 checkpoint of random weights, the same each time, and quantize it if asked; return the directory."""
    kind, settings = ARCHITECTURES[architecture]
    if large:
        settings = {**settings, **LARGER}
        for group in (LARGER_EXPERTS, LARGER_LATENT):
            settings |= {name: value for name, value in group.items() if name in settings}
        if "kv_lora_rank" in settings:
            settings.pop("head_dim")
    checkpoints.write_checkpoint(directory, kind, settings, dtype=torch.bfloat16)
    _set_biases(directory)
    return directory if method is None else quantize(directory, method)


def _set_biases(directory: Path) -> None:
    """Give a router's bias values: it begins as zeros, which a place in memory that was never written holds, too."""
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        biases = {name: tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
        for name, bias in biases.items():
            tensors[name] = torch.linspace(0.1, 0.4, bias.numel(), dtype=bias.dtype)
        if biases:
            save_file(tensors, path, metadata={"format": "pt"})
