"""Text out of single tokens: what is streamed adds up to what decoding everything at once gives."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from appliance.engine.detokenizer import INCOMPLETE, Detokenizer
from tests.engine.checkpoints import small_tokenizer

TEXTS = ("größer", "重みは残る。", "👩‍👩‍👧 🇩🇪", " two  spaces ", "a\n\n\tb", "\x00\x01", "e\u0301", "नमस्ते")


@given(text=st.text(max_size=30), cut=st.integers(0, 60))
def test_the_pieces_add_up_wherever_the_answer_ends(text: str, cut: int) -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[: len(ids) - cut % (len(ids) + 1)]
    pieces = detokenized(tokenizer.decode, ids)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == (whole if text.endswith(INCOMPLETE) else whole.rstrip(INCOMPLETE))


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_shows_half_a_character(text: str) -> None:
    bytewise, worded = small_tokenizer(), bytes_behind_spaces()
    for decode, ids in (
        (bytewise.decode, bytewise.encode(text, add_special_tokens=False)),
        (worded.decode, worded.encode(text).ids),
    ):
        pieces = detokenized(decode, ids)
        assert "".join(pieces) == decode(ids)
        assert not any(INCOMPLETE in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte_and_not_later() -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("🙃x", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer.decode)
    assert [detokenizer.push(one) for one in ids] == ["", "", "", "🙃", "x"][-len(ids) :]


def test_special_tokens_say_nothing_and_cost_nothing() -> None:
    tokenizer = small_tokenizer()
    special, word = tokenizer.eos_token_id, tokenizer.encode(" weights")[0]
    lengths: list[int] = []

    def decode(ids: Any) -> str:
        lengths.append(len(ids))
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    pieces = detokenized(decode, [special] * 500 + [word] + [special] * 500 + [word])
    assert "".join(pieces) == tokenizer.decode([word, word])
    assert max(lengths) < 10


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_are_no_text_never_raise_and_never_pile_up(seed: int) -> None:
    tokenizer = small_tokenizer()
    lengths: list[int] = []

    def decode(ids: Any) -> str:
        lengths.append(len(ids))
        return str(tokenizer.decode(ids))

    source = random.Random(seed)
    begins_a_character = tokenizer.convert_tokens_to_ids("Ã")  # how a byte-level vocabulary writes 0xC3
    detokenized(decode, [source.randrange(len(tokenizer)) for _ in range(1000)] + [begins_a_character] * 1000)
    assert max(lengths) < 16


def test_a_leading_space_survives_at_the_start_of_a_piece_but_not_of_the_text() -> None:
    tokenizer = bytes_behind_spaces()
    ids = tokenizer.encode("▁a▁b▁a").ids
    assert detokenized(tokenizer.decode, ids) == ["a", " b", " a", ""]


def detokenized(decode: Any, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [detokenizer.push(one) for one in ids] + [detokenizer.finish()]


def bytes_behind_spaces() -> Tokenizer:
    """A vocabulary like Llama 2's: words behind a visible space, and single bytes for everything else."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)}
    words |= {word: 256 + index for index, word in enumerate(("▁", "a", "b", "▁a", "▁b"))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", left=1),
        ]
    )
    return tokenizer
