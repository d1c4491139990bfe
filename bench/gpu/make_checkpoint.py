"""Write a checkpoint of random bf16 weights in the shapes of a dense decoder, some files of about equal size.

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


def layer_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the weights of one layer, in the proportions of an 8B decoder."""
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
                values = torch.empty(shape, dtype=torch.int16, device=device)
                values.random_(-(2**15), 2**15, generator=generator)
                tensors[f"model.layers.{layer}.{part}.weight"] = values.view(torch.bfloat16).cpu()
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        written += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "bench", "num_hidden_layers": layers}))
    return written


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
