"""Makes checkpoints small enough to load in milliseconds, whose random weights still say something varied."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = (
    "The weights stay while the engine restarts. Die Gewichte bleiben, größer und schöner. "
    "Les poids restent, déjà vérifiés. 重みは残る。權重仍在。 🙂 👩‍👩‍👧 done.\n"
)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and loop.first %}{{ raise_exception('the user speaks first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"
CONTEXT_TOKENS = 512

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.6,  # large: greedy answers of a random model would repeat one token otherwise
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
# One of each kind of difference: ties, scaled rotary tables, extra norms, buffers that scale embeddings, experts that
# are merged while loading, fused projections, transposed layers, tensors kept in float32, parts with a config of their
# own.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL | {"tie_word_embeddings": True}),
    "llama-untied": ("llama", SMALL | {"tie_word_embeddings": False, "rope_parameters": ROPE}),
    "qwen3": ("qwen3", SMALL | {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", SMALL | EXPERTS | {"head_dim": 16, "num_experts": 4}),
    "gemma3": ("gemma3_text", SMALL | {"head_dim": 16}),
    "phi3": ("phi3", SMALL),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_TOKENS}),
    "deepseek-v3": (
        "deepseek_v3",
        SMALL
        | EXPERTS
        | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1},
    ),
    "granite-swa": ("granite_swa", SMALL),
    "ernie-moe": ("ernie4_5_moe", SMALL | EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
}


def make_checkpoint(directory: Path, *, architecture: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """Write config, tokenizer, chat template and random weights, the same each time; return the directory."""
    kind, settings = ARCHITECTURES[architecture]
    return write_checkpoint(directory, kind, settings, dtype=dtype)


def write_checkpoint(directory: Path, kind: str, settings: dict[str, Any], *, dtype: torch.dtype) -> Path:
    """Write a checkpoint of one model type of transformers, with these settings in its config."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = small_tokenizer()
    vocabulary = len(tokenizer)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]), quiet():
        config = transformers.AutoConfig.for_model(kind, vocab_size=vocabulary, **ends, **settings)
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by the names that they have in its files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@functools.cache
def small_tokenizer() -> Any:
    """A byte-level BPE of 400 tokens, with ChatML's special tokens and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 10, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|pad|>", chat_template=TEMPLATE
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Saving draws a progress bar, and some default configs name tokens that a small vocabulary has not."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
