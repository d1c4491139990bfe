"""Write a checkpoint of random bf16 weights, a Qwen3 of 4096 wide and as many layers as fit, in files of equal size.

python -m bench.gpu.make_checkpoint FOLDER [--gb 16.4] [--files 8] [--fake]
"""

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.gpu.device import is_fake, prepared, torch_device

HIDDEN = 4096
FAKE_HIDDEN = 512
HEAD = 128
VOCABULARY = 512
DEVIATION = 0.02


def layer_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the weights of one layer, in the proportions of an 8B decoder; the names are Qwen3's."""
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (3 * hidden, hidden),
        "mlp.up_proj": (3 * hidden, hidden),
        "mlp.down_proj": (hidden, 3 * hidden),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
    }


def write(folder: Path, *, size_bytes: int, files: int, device: torch.device, hidden: int = HIDDEN) -> int:
    """Write the checkpoint, about `size_bytes` of tensors, and return their exact size."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = layer_shapes(hidden)
    layers = max(files, round(size_bytes / sum(2 * torch.Size(shape).numel() for shape in shapes.values())))
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    written = 0
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        tensors = {}
        for layer in range(number * layers // files, (number + 1) * layers // files):
            for part, shape in shapes.items():
                tensors[f"model.layers.{layer}.{part}.weight"] = _random(shape, device, generator)
        if number == files - 1:
            for part, shape in {
                "model.embed_tokens": (VOCABULARY, hidden),
                "model.norm": (hidden,),
                "lm_head": (VOCABULARY, hidden),
            }.items():
                tensors[f"{part}.weight"] = _random(shape, device, generator)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        written += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config(hidden, layers)))
    return written


def _random(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1:
        return values.fill_(1).cpu()
    return values.normal_(0, DEVIATION, generator=generator).cpu()


def _config(hidden: int, layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // 4 // HEAD,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=16.4)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--fake", action="store_true")
    args = parser.parse_args()
    started = time.monotonic()
    with prepared(fake=args.fake):
        written = write(
            args.folder,
            size_bytes=int(args.gb * 1e9),
            files=args.files,
            device=torch_device(0),
            hidden=FAKE_HIDDEN if is_fake() else HIDDEN,
        )
    print(f"{written / 1e9:.2f} GB in {args.files} files, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
