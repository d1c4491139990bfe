"""Turns prompts and conversations into token ids, the way the checkpoint's own tokenizer and chat template do.

Encoding goes through transformers rather than straight to the tokenizers library because its batch entry releases the
interpreter: a prompt of megabytes must not stop the server from answering others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError


class ChatTemplateRefusal(ValueError):
    """The checkpoint's chat template does not accept this conversation."""


class Tokenizer:
    """A checkpoint's tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def end_id(self) -> int | None:
        end: int | None = self._tokenizer.eos_token_id
        return end

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, with whatever the tokenizer puts before one (a BOS token, say)."""
        return self._encoded(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the ids of a conversation up to where the assistant speaks; ChatTemplateRefusal if it is refused."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program, and may fail over this conversation in any way
            raise ChatTemplateRefusal(" ".join(str(error).split())[:300] or type(error).__name__) from error
        # The template has already written the special tokens.
        return self._encoded(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids without special tokens; bytes that are not yet a character are U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids


def load_tokenizer(configs_dir: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint; ConfigError if there is none, or if it needs code to be run."""
    from transformers import AutoTokenizer

    try:
        return Tokenizer(
            AutoTokenizer.from_pretrained(str(configs_dir), local_files_only=True, trust_remote_code=False)
        )
    except Exception as error:  # the tokenizers library raises bare Exception over a file that it cannot read
        raise ConfigError(
            f"{configs_dir}: the tokenizer cannot be loaded: {' '.join(str(error).split())[:300]}",
            hint="the checkpoint needs tokenizer.json and tokenizer_config.json",
        ) from error
