"""Turns the demo's model, as it was downloaded, into a checkpoint. A program of its own: `python -m ... SOURCE DEST`.

It imports torch and transformers, holds the model twice and is gone afterwards; its caller stays as small as it was.
"""

import sys
from pathlib import Path

SHARD_SIZE = "100MB"  # three files for the demo's model: enough to show that one of them is named
MODE = 0o644  # safetensors writes files that only their owner can read


def convert(source: Path, destination: Path) -> None:
    """Write the model in `source` (a GGUF file, or a directory of safetensors) to `destination` as bf16 safetensors.

    Tokenizer and chat template come with it. The same source and releases of transformers give the same bytes.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if source.is_file():
        place: dict[str, str] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    else:
        place = {"pretrained_model_name_or_path": str(source)}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if source.is_file():
        # The tensors are plain bf16 by now; with these left, transformers would refuse to save them.
        del model.config.quantization_config
        model.hf_quantizer = None
    model.save_pretrained(destination, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(destination)
    for file in destination.iterdir():
        file.chmod(MODE)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
