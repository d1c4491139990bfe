"""A LoRA adapter of random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 8


def make_adapter(folder: Path, checkpoint: Path) -> None:
    """Write an adapter for the attention's projections of a checkpoint."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if name.endswith((".q_proj.weight", ".v_proj.weight")):
                place = f"base_model.model.{name.removesuffix('.weight')}"
                outputs, inputs = tensor.shape
                tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
                tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
