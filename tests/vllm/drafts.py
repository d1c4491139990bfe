"""Makes the drafts of a tiny checkpoint: small models of their own, heads on its hidden states, and layers within it.

A draft changes no answer, whatever it proposes. So what it proposes has to be looked at by itself.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine import checkpoints

TOKENS = 3
Tensors = dict[str, torch.Tensor]


def add_draft(folder: Path, checkpoint: Path, method: str) -> dict[str, Any]:
    """Return the `draft` of a manifest, after making its checkpoint in `folder`, or its layer in the target's own."""
    settings: dict[str, Any] = {"method": method, "tokens": TOKENS}
    if method == "mtp":
        _add_predicting_layer(checkpoint)
    elif method != "ngram":
        _DRAFTS[method](folder, json.loads((checkpoint / "config.json").read_text()))
        settings["checkpoint"] = str(folder)
    return settings


def _small_model(folder: Path, config: dict[str, Any]) -> None:
    sizes = {name: config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
    settings = checkpoints.SMALL | sizes | {"num_hidden_layers": 1}
    checkpoints.write_checkpoint(folder, "llama", settings, dtype=torch.bfloat16)


def _eagle(folder: Path, config: dict[str, Any]) -> None:
    """Write a head that has neither embedding nor output of its own: it computes with the target's."""
    hidden = config["hidden_size"]
    tensors = {
        "fc.weight": _random(hidden, 2 * hidden),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
        **_attention("layers.0", config, inputs=hidden),
        **_mlp("layers.0", config),
    }
    _write(folder, tensors, config | {"num_hidden_layers": 1})


def _eagle3(folder: Path, config: dict[str, Any]) -> None:
    """Write a head on the hidden states of three places, which speaks a smaller vocabulary in an output of its own."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"] // 2
    # Every other token; what is kept is how far each is from its own number.
    offsets = torch.arange(vocabulary)
    tensors = {
        "fc.weight": _random(hidden, 3 * hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": _random(vocabulary, hidden),
        "d2t": offsets,
        "t2d": torch.arange(config["vocab_size"]) % 2 == 0,
        **{f"midlayer.{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "input_layernorm")},
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        **_attention("midlayer", config, inputs=2 * hidden),
        **_mlp("midlayer", config),
    }
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": vocabulary,
        # After the embedding and each of the target's two layers.
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    _write(folder, tensors, config | settings)


_DRAFTS = {"draft_model": _small_model, "eagle": _eagle, "eagle3": _eagle3}


def _add_predicting_layer(checkpoint: Path) -> None:
    """Append to DeepSeek's layers one that predicts the token after next, from the last of the others."""
    config = json.loads((checkpoint / "config.json").read_text())
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    (path,) = checkpoint.glob("*.safetensors")
    tensors = load_file(path)
    last, place = f"model.layers.{count - 1}.", f"model.layers.{count}."
    layer = {place + name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    # Layers are not alike: one that was loaded in another's place is to be noticed.
    layer = {name: tensor.flip(0).contiguous() for name, tensor in layer.items()}
    layer |= {place + f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in ("enorm", "hnorm")}
    layer[place + "shared_head.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    layer[place + "eh_proj.weight"] = _random(hidden, 2 * hidden)
    # Checkpoints have these twice, and vLLM computes with the target's.
    layer[place + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    layer[place + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | layer, path, metadata={"format": "pt"})
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def _attention(place: str, config: dict[str, Any], *, inputs: int) -> Tensors:
    width = config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        f"{place}.self_attn.q_proj.weight": _random(queries, inputs),
        f"{place}.self_attn.k_proj.weight": _random(keys, inputs),
        f"{place}.self_attn.v_proj.weight": _random(keys, inputs),
        f"{place}.self_attn.o_proj.weight": _random(config["hidden_size"], queries),
    }


def _mlp(place: str, config: dict[str, Any]) -> Tensors:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        f"{place}.mlp.gate_proj.weight": _random(inner, hidden),
        f"{place}.mlp.up_proj.weight": _random(inner, hidden),
        f"{place}.mlp.down_proj.weight": _random(hidden, inner),
    }


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 0.3).to(torch.bfloat16)


def _write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir()
    floats = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
