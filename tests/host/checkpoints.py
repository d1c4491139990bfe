"""Two checkpoints that a structure cannot tell apart, and the greedy answer of each."""

import shutil
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.engine.checkpoints import make_checkpoint, quiet
from tests.host.stream import PROMPT, TOKENS


class Checkpoints:
    """Two checkpoints of the same shapes that answer differently, and what each answers."""

    def __init__(self, folder: Path) -> None:
        self.first = make_checkpoint(folder / "first")
        self.second = folder / "second"
        shutil.copytree(self.first, self.second)
        _stir(next(self.second.glob("*.safetensors")))
        self.answers = {path: _greedy(path) for path in (self.first, self.second)}
        assert len(set(self.answers.values())) == 2


def _stir(file: Path) -> None:
    """Change the weights of a file, and nothing else in it."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) if tensor.dim() == 2 else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata=metadata)


def _greedy(checkpoint: Path) -> str:
    with quiet(), torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        prompt = tokenizer(PROMPT, return_tensors="pt")
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=TOKENS)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
