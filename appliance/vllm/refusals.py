"""What vLLM may be asked for that would write to weights in place, and is refused before anything is mapped."""

from typing import Any

from appliance.errors import ConfigError


def refuse_writers(vllm_config: Any) -> None:
    """Return if nothing that this engine is set up for overwrites its weights; ConfigError, saying what, if not."""
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
