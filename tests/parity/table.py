"""The rows of the parity table that one process on a CPU can run, and those that vLLM cannot run there."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One checkpoint and how it is served; `draft` is a method of speculation.

    `alone` is for one more engine, which knows of no manifest. `error` is vLLM's own where it does not run on a CPU,
    `refusal` ours where it would write to attached weights.
    """

    architecture: str
    method: str | None = None
    arguments: tuple[str, ...] = ()
    draft: str = ""
    adapter: bool = False
    prefix: bool = False
    alone: bool = False
    error: str = ""
    refusal: str = ""


# Weights of 8 bits want a product that vLLM has on a CPU only with AMX.
NO_FP8 = "static_scaled_fp8_quant() expected at most 0 argument(s)"
NO_FP8_BLOCKS = "Failed to find a kernel that can implement the ScaledMM linear layer"

# And those of 4 bits one that it has only with AVX-512.
NO_4_BITS = "" if "avx512f" in Path("/proc/cpuinfo").read_text() else "object has no attribute 'cpu_gemm_wna16'"

REAL = "SmolLM2"

ROWS = {
    "llama": Row("llama"),
    "qwen3": Row("qwen3", alone=True),
    "qwen3-moe": Row("qwen3-moe"),
    "mixtral": Row("mixtral"),
    "mistral": Row("mistral"),
    "gemma3": Row("gemma3"),
    "phi3": Row("phi3"),
    "deepseek-v2": Row("deepseek-v2"),
    "deepseek-v3": Row("deepseek-v3"),
    "gpt-oss": Row("gpt-oss"),
    "llama fp8": Row("llama", "fp8", error=NO_FP8),
    "llama fp8-block": Row("llama", "fp8-block", error=NO_FP8_BLOCKS),
    "llama awq": Row("llama", "awq", error=NO_4_BITS),
    "llama gptq": Row("llama", "gptq", error=NO_4_BITS),
    "llama compressed-tensors-fp8": Row("llama", "compressed-tensors-fp8"),
    "llama compressed-tensors-int8": Row("llama", "compressed-tensors-int8"),
    "qwen3-moe fp8": Row("qwen3-moe", "fp8", error=NO_FP8),
    REAL: Row(REAL),
    "llama with LoRA": Row("llama", adapter=True, arguments=("--enable-lora", "--max-lora-rank", "8")),
    "llama with ngram speculation": Row("llama", draft="ngram"),
    "llama with a small draft": Row("llama", draft="draft_model", alone=True),
    "llama with EAGLE": Row("llama", draft="eagle"),
    "llama with EAGLE3": Row("llama", draft="eagle3"),
    "deepseek-v3 with MTP": Row("deepseek-v3", draft="mtp", alone=True),
    "llama with prefix caching": Row("llama", prefix=True, arguments=("--block-size", "32")),
    "llama with sleep mode": Row(
        "llama", arguments=("--enable-sleep-mode",), error="Sleep mode is not supported on current platform"
    ),
    "llama with weight transfer": Row(
        "llama",
        arguments=("--weight-transfer-config", '{"backend": "nccl"}'),
        refusal="ConfigError: --weight-transfer-config: attached weights are shared and read-only",
    ),
}
