"""What the configs of a checkpoint say about its model: architecture, dtype and how it likes to be sampled.

The files come from a directory that holds no weights. They are verified before they get here, but a signed file can
still be wrong: whatever is wrong with one is a ConfigError that names it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.engine.imports import quiet_transformers
from appliance.errors import ConfigError

if TYPE_CHECKING:
    import torch

SIZE_LIMIT_BYTES = 16 << 20
LAYERS_LIMIT = 4096
DTYPES = ("bfloat16", "float16", "float32")


def load_config(configs_dir: Path, *, dtype: str) -> Any:
    """Return the transformers config of a checkpoint, its dtype settled; refuses what this engine cannot serve.

    `dtype` is one of DTYPES, or "auto" for what config.json says. A skeleton has no weights to guess from, so where
    config.json says nothing "auto" is an error.
    """
    path = configs_dir / "config.json"
    said = read_object(path)
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = said.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise _unknown_architecture(path, said)
    _refuse_endless_models(path, said)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(configs_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config class may raise anything at all over values it did not expect
        raise ConfigError(f"{path}: transformers does not accept it: {_first_line(error)}") from error
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            raise ConfigError(
                f"{path}: quantization_config: the built-in engine serves unquantized checkpoints only",
                hint="use `engine: {kind: vllm}` for this model",
            )
    # These make loading run other code, or read other files, than the same config does without them.
    for name in ("auto_map", "fusion_config", "transformers_weights"):
        if hasattr(config, name):
            delattr(config, name)
    # Likewise: some of its values fetch kernels from the hub. None is torch's own, where the model has any experts.
    config._experts_implementation = None
    config.dtype = _settled_dtype(config, dtype, path=path)
    return config


def stated_dtype(configs_dir: Path, *, dtype: str) -> str:
    """Return the name of the dtype that a model will have, as far as a look at config.json tells; else empty.

    For who plans its memory before transformers, whose import takes seconds, settles it.
    """
    if dtype != "auto":
        return dtype
    said = read_object(configs_dir / "config.json")
    inner = said.get("text_config")
    for part in (said, inner if isinstance(inner, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if isinstance(part.get(name), str):
                return str(part[name])
    return ""


@dataclass(frozen=True)
class SamplingDefaults:
    """What generation_config.json recommends; a request's own settings come first. None: nothing is recommended."""

    stop_ids: tuple[int, ...]
    pad_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


def load_sampling_defaults(configs_dir: Path) -> SamplingDefaults:
    """Return generation_config.json's recommendations; config.json's ids where it does not exist or is silent."""
    path = configs_dir / "generation_config.json"
    said = read_object(path) if path.exists() else {}
    outer = read_object(configs_dir / "config.json")
    inner = outer.get("text_config")
    fallback = outer | inner if isinstance(inner, dict) else outer
    eos = said["eos_token_id"] if said.get("eos_token_id") is not None else fallback.get("eos_token_id")
    pad = said["pad_token_id"] if said.get("pad_token_id") is not None else fallback.get("pad_token_id")
    try:
        return SamplingDefaults(
            stop_ids=tuple(
                _token_id(one, "eos_token_id") for one in (eos if isinstance(eos, list) else [eos]) if one is not None
            ),
            pad_id=None if pad is None else _token_id(pad, "pad_token_id"),
            temperature=_number(said, "temperature", low=0, high=100),
            top_p=_number(said, "top_p", low=0, high=1),
            top_k=_whole_number(said, "top_k"),
            repetition_penalty=_number(said, "repetition_penalty", low=0.01, high=100),
        )
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; ConfigError with line and column on anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(data) > SIZE_LIMIT_BYTES:
        raise ConfigError(f"{path}: larger than {SIZE_LIMIT_BYTES >> 20} MiB")
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not JSON: byte {error.start} is not UTF-8") from error
    except (RecursionError, ValueError) as error:  # ValueError: a number of more digits than Python converts
        raise ConfigError(f"{path}: not JSON that can be read: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def _unknown_architecture(path: Path, said: dict[str, Any]) -> ConfigError:
    kind = said.get("model_type")
    if "auto_map" in said:
        return ConfigError(
            f"{path}: model_type {kind!r} needs code that comes with the checkpoint, and such code is never run",
            hint="use a checkpoint whose architecture is part of transformers",
        )
    if kind is None:
        return ConfigError(f"{path}: no model_type")
    from transformers import __version__

    return ConfigError(f"{path}: model_type {kind!r} is unknown to transformers {__version__}")


def _refuse_endless_models(path: Path, said: dict[str, Any]) -> None:
    """Modules are made one by one, before any weight is compared with them: too many would never end."""
    for name, value in said.items():
        if isinstance(value, dict):
            _refuse_endless_models(path, value)
        elif "layer" in name and isinstance(value, int | float) and value > LAYERS_LIMIT:
            raise ConfigError(f"{path}: {name}: {value:.4g} is more than any model has")


def _settled_dtype(config: Any, dtype: str, *, path: Path) -> "torch.dtype":
    import torch

    allowed = {name: getattr(torch, name) for name in DTYPES}
    if dtype != "auto":
        if dtype not in allowed:
            raise ConfigError(f"dtype {dtype!r} is unknown: one of auto, {', '.join(DTYPES)}")
        chosen: torch.dtype = allowed[dtype]
        return chosen
    for part in (config, config.get_text_config()):
        said = getattr(part, "dtype", None)
        if said is None:
            continue
        if isinstance(said, str):
            said = allowed.get(said, said)
        if not any(said is one for one in allowed.values()):
            raise ConfigError(f"{path}: dtype: {said!r} cannot be served: one of {', '.join(DTYPES)}")
        settled: torch.dtype = said
        return settled
    raise ConfigError(f"{path}: dtype: missing", hint="set the model's dtype in the manifest")


def _token_id(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{name}: {value!r} is not a token id")
    return value


def _number(said: dict[str, Any], name: str, *, low: float, high: float) -> float | None:
    value = said.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(f"{name}: {value!r} is not a number from {low} to {high}")
    return float(value)


def _whole_number(said: dict[str, Any], name: str) -> int | None:
    value = said.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{name}: {value!r} is not a whole number")
    return value


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
