"""What vLLM may be asked for that attached weights do not allow, refused before anything is mapped."""

from typing import Any

from appliance.errors import ConfigError
from appliance.vllm.plugin import LOAD_FORMAT

# A hint, where vLLM loads by another loader than it is told to.
OTHER_LOADERS = "with bitsandbytes vLLM 0.26 and 0.27 do so: take a later one, or another quantization"


def refuse_movers(vllm_config: Any) -> None:
    """Return if nothing that this engine is set up for writes to its weights or moves them; ConfigError if not.

    The error says what it is, why it cannot be, and what to do instead.
    """
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "--enable-sleep-mode: attached weights lie outside the pool that sleeping empties, and waking would fill",
            hint="stop the engine instead: its weights stay with the keeper",
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "--weight-transfer-config: attached weights are shared and read-only, and cannot be updated in place",
            hint="serve the updated checkpoint: sign it, and put it in place of the old one",
        )
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise ConfigError(
            "--enable-eplb: balancing moves experts between ranks in place, and attached weights are read-only",
            hint="leave it out: experts stay on the ranks that --expert-placement-strategy gives them",
        )
    offload = getattr(vllm_config, "offload_config", None)
    if _at(offload, "uva", "cpu_offload_gb") or _at(offload, "prefetch", "offload_group_size"):
        raise ConfigError(
            "--cpu-offload-gb, --offload-group-size: attached weights stay on their device, all of them",
            hint="divide the model over more GPUs with `parallel`",
        )


def refuse_other_loaders(vllm_config: Any) -> None:
    """Return if vLLM is to load by us, ConfigError where it has replaced the format that its command line names."""
    if (format_ := str(vllm_config.load_config.load_format)) != LOAD_FORMAT:
        raise ConfigError(
            f"vLLM loads this model in its own format `{format_}`, whatever it is told: nothing could be kept",
            hint=OTHER_LOADERS,
        )


def _at(config: Any, part: str, setting: str) -> Any:
    return getattr(getattr(config, part, None), setting, 0)
