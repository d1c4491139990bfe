"""Every fact by which vLLM decides how weights lie in memory, as one rank sees it before anything is loaded."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from appliance import inventory
from appliance.handover.device import device_facts
from appliance.manifest.shaping import shaping_variables

# Settings of vLLM's own configuration, by their places in a VllmConfig. Older releases have not all of them.
_SETTINGS = {
    "vllm.kv_cache.dtype": "cache_config.cache_dtype",
    "vllm.kv_cache.scales": "cache_config.calculate_kv_scales",
    "vllm.attention": "attention_config.backend",
    "vllm.kernels": "kernel_config",
    "vllm.parallel.tensor": "parallel_config.tensor_parallel_size",
    "vllm.parallel.pipeline": "parallel_config.pipeline_parallel_size",
    # Dense replicas know of no other: here the size is 1 for each.
    "vllm.parallel.data": "parallel_config.data_parallel_size",
    "vllm.parallel.expert": "parallel_config.enable_expert_parallel",
    "vllm.parallel.balanced": "parallel_config.enable_eplb",
    "vllm.parallel.redundant": "parallel_config.eplb_config.num_redundant_experts",
    "vllm.parallel.placement": "parallel_config.expert_placement_strategy",
    "vllm.parallel.all2all": "parallel_config.all2all_backend",
    "vllm.parallel.context": "parallel_config.decode_context_parallel_size",
    "vllm.parallel.prefill_context": "parallel_config.prefill_context_parallel_size",
    "vllm.offload": "offload_config",
}
_MODEL_SETTINGS = {
    "model.quantization": "quantization",
    "model.max_len": "max_model_len",
    "model.runner": "runner_type",
    "model.convert": "convert_type",
    "model.implementation": "model_impl",
}
# Kernels that weights are laid out for come in packages of their own.
_KERNEL_PACKAGES = ("flashinfer-python", "deep-gemm", "compressed-tensors")


def facts(vllm_config: Any, model_config: Any, *, device: str) -> dict[str, object]:
    """Return what shapes one rank's bytes, and what it runs on. `device` is `cpu` or a GPU's UUID."""
    found: dict[str, object] = {
        **device_facts(device),
        "model.architecture": ",".join(model_config.architectures),
        "model.type": model_config.hf_config.model_type,
        "model.dtype": str(model_config.dtype).removeprefix("torch."),
        "config.sha256": _digest(model_config.hf_config),
        "vllm.lora": vllm_config.lora_config is not None,
    }
    found |= {name: _at(model_config, setting) for name, setting in _MODEL_SETTINGS.items()}
    found |= {name: _at(vllm_config, place) for name, place in _SETTINGS.items()}
    found |= {f"{package}.version": inventory.version(package) for package in _KERNEL_PACKAGES}
    return found | {f"env.{name}": os.environ.get(name, "") for name in shaping_variables(os.environ)}


def _digest(hf_config: Any) -> str:
    """Return the digest of all that the model's code may read, overrides of the command line included."""
    settings = _placeless(hf_config.to_dict())
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _placeless(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out where a folder lies, which shapes nothing. A draft's settings hold those of a whole other config."""
    return {
        name: _placeless(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in ("_name_or_path", "name_or_path")
    }


def _at(config: Any, place: str) -> object:
    for name in place.split("."):
        config = getattr(config, name, None)
    return "" if config is None else config
