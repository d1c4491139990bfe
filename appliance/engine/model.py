"""Builds a checkpoint's transformers model: from tensors in memory, or as a skeleton that the shard is attached to.

Both ways end in the same module, bit for bit: the same class, names, ties and dtypes, in evaluation mode, without
gradients. Nothing here opens a weight file or a network connection, and code from a checkpoint is never run.
"""

import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch

from appliance.engine.configs import load_config
from appliance.engine.imports import quiet_transformers
from appliance.engine.in_place import in_place, make_plain
from appliance.errors import ConfigError

__all__ = ["load", "load_config", "skeleton"]

NAMES_SHOWN = 8


def skeleton(configs_dir: Path, *, dtype: str) -> torch.nn.Module:
    """Return the model on the meta device, with its ties; buffers that a constructor computes have no values either.

    Refuses (ConfigError) a config that transformers cannot build a language model from.
    """
    config = load_config(configs_dir, dtype=dtype)
    with quiet_transformers(), torch.device("meta"):
        model = _built(config, path=configs_dir / "config.json")
    _apply_kept_dtypes(model, config.dtype)
    return _ready(model)


def load(configs_dir: Path, tensors: MutableMapping[str, torch.Tensor], *, dtype: str) -> torch.nn.Module:
    """Return the model made of tensors named as in the checkpoint's files; refuses any missing, unknown or misshapen.

    `tensors` is left empty: a tensor of the right dtype becomes the parameter itself, one that must be converted is
    freed once it has been, so the weights are never in memory twice. One that is on a device stays there. What
    transformers declares ignorable for this architecture (an old checkpoint's rotary tables, say) is ignored.
    """
    outline = skeleton(configs_dir, dtype=dtype)
    config: Any = outline.config
    architecture: Any = type(outline)
    state = {name: _TakenOnce(tensors, name) for name in tensors}
    try:
        with quiet_transformers():
            model, report = architecture.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=config.dtype,
                attn_implementation=config._attn_implementation,
                local_files_only=True,
                trust_remote_code=False,
                use_kernels=False,
                # Reported below together with everything else that does not fit, instead of raised alone.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError as error:  # the checkpoint's experts or fused projections do not convert
        raise ConfigError(
            f"{configs_dir}: the tensors do not fit config.json: {' '.join(str(error).split())}"
        ) from error
    finally:
        tensors.clear()
    _refuse_misfits(report, configs_dir)
    make_plain(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(f"{configs_dir}: nothing in the checkpoint gives {name} a value")
    return _ready(model)


class _TakenOnce:
    """Stands in for a tensor until transformers reads it, in the form that it expects of a file's lazy slices."""

    def __init__(self, tensors: MutableMapping[str, torch.Tensor], name: str) -> None:
        self._tensors = tensors
        self._name = name

    def __getitem__(self, _: object) -> torch.Tensor:
        return in_place(self._tensors.pop(self._name))


def _built(config: Any, *, path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # A checkpoint may name an attention kernel that transformers would fetch from the hub; these two are part of torch.
    for attention in ("sdpa", "eager"):
        try:
            return AutoModelForCausalLM.from_config(
                config, dtype=config.dtype, attn_implementation=attention, trust_remote_code=False
            )
        except Exception as error:  # a model's constructor may raise anything over a value it did not expect
            if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
                continue
            raise ConfigError(
                f"{path}: no language model can be built: {' '.join(str(error).split())[:300]}"
            ) from error
    raise AssertionError("every architecture has eager attention")


def _apply_kept_dtypes(model: Any, dtype: torch.dtype) -> None:
    """Some architectures keep a few tensors in float32; transformers sees to it in loading, not in building."""
    for pattern, kept in model._get_dtype_plan(dtype).items():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)


def _refuse_misfits(report: dict[str, Any], configs_dir: Path) -> None:
    wrong = []
    if missing := report["missing_keys"]:
        wrong.append(f"missing: {_listed(missing)}")
    if unknown := report["unexpected_keys"]:
        wrong.append(f"unknown to this architecture: {_listed(unknown)}")
    if misshapen := report["mismatched_keys"]:
        shapes = [f"{name} is {list(found)} instead of {list(wanted)}" for name, found, wanted in misshapen]
        wrong.append(f"wrong shape: {_listed(shapes)}")
    if wrong:
        raise ConfigError(f"{configs_dir}: the tensors do not fit config.json: {'; '.join(wrong)}")


def _listed(names: Any) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    return ", ".join(ordered[:NAMES_SHOWN]) + more


def _ready(model: Any) -> torch.nn.Module:
    """Ready to answer, and without the marks that tell how a model was made, so that both ways end in the same."""
    module: torch.nn.Module = model.eval().requires_grad_(False)
    for part in module.modules():
        if (config := part.__dict__.get("config")) is not None:
            config.name_or_path = ""  # some parts have a copy
        for mark in ("_is_hf_initialized", "_weight_conversions", "_use_kernels"):
            part.__dict__.pop(mark, None)
        if "name_or_path" in part.__dict__:
            part.__dict__["name_or_path"] = ""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.__dict__.clear()  # marks for training, for torch's register_buffer and for transformers' loading
    return module
