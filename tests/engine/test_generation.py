"""Answers of a real (random) model: the same tokens as transformers' own, ended where the request says."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from appliance.engine.answer import Cancelled, Finish, Piece, Sampling
from appliance.engine.configs import SamplingDefaults
from appliance.engine.detokenizer import INCOMPLETE
from appliance.engine.generation import LanguageModel
from appliance.engine.model import load
from appliance.engine.tokenizer import load_tokenizer
from appliance.errors import ConfigError
from tests.engine.checkpoints import CONTEXT_TOKENS, read_tensors

PROMPT = "The weights stay while"
NEVER = threading.Event()


def test_greedy_tokens_are_those_of_transformers(checkpoint: Path, language_model: LanguageModel) -> None:
    module: Any = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    prompt = language_model.tokenizer.encode(PROMPT)
    expected = module.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, attention_mask=torch.ones(1, len(prompt))
    )[0, len(prompt) :].tolist()
    text, ids, finish = answer(language_model, PROMPT, Sampling(40, temperature=0))
    assert ids == expected
    assert len(set(ids)) > 15  # it says something varied, or most of these tests would prove little
    assert finish == Finish("length", 40)
    assert text == language_model.tokenizer.decode(ids).rstrip(INCOMPLETE)


@pytest.mark.parametrize("sampling", [Sampling(20, temperature=1e-9), Sampling(20, top_p=0.0)])
def test_the_limits_of_temperature_and_top_p_are_greedy(language_model: LanguageModel, sampling: Sampling) -> None:
    assert answer(language_model, PROMPT, sampling) == answer(language_model, PROMPT, Sampling(20, temperature=0))


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(language_model: LanguageModel) -> None:
    first, second, other, unseeded, again = (
        answer(language_model, PROMPT, Sampling(30, temperature=1.5, seed=seed)) for seed in (7, 7, 8, None, 7)
    )
    assert first == second == again
    assert first not in (other, unseeded)
    assert answer(language_model, PROMPT, Sampling(30, temperature=1.5)) != unseeded


def test_sampling_leaves_the_random_state_of_the_process_alone(language_model: LanguageModel) -> None:
    before = torch.random.get_rng_state()
    answer(language_model, PROMPT, Sampling(5, temperature=1.5, seed=3))
    answer(language_model, PROMPT, Sampling(5, temperature=1.5))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_top_p_and_top_k_narrow_the_choice(language_model: LanguageModel) -> None:
    greedy = answer(language_model, PROMPT, Sampling(20, temperature=0))
    assert answer(language_model, PROMPT, Sampling(20, temperature=2.0, top_p=1e-6, seed=1)) == greedy
    assert answer(language_model, PROMPT, Sampling(20, temperature=2.0, top_k=1, seed=1)) == greedy
    # transformers would choose among 50 if nothing were said.
    wide = {ids[0] for seed in range(150) if (ids := answer(language_model, PROMPT, hot(seed))[1])}
    assert len(wide) > 50


def test_an_end_token_ends_the_answer_and_is_counted_but_not_shown(checkpoint: Path, language_model: Any) -> None:
    _, ids, _ = answer(language_model, PROMPT, Sampling(20, temperature=0))
    decode = language_model.tokenizer.decode
    end = next(one for one in ids[3:] if decode([one]).isalpha())  # a token that would show if it were let
    model = built(checkpoint, SamplingDefaults(stop_ids=(end,)))
    text, ended, finish = answer(model, PROMPT, Sampling(20, temperature=0))
    assert ended == ids[: ids.index(end) + 1]
    assert finish == Finish("stop", len(ended))
    assert text == language_model.tokenizer.decode(ended[:-1]).rstrip(INCOMPLETE)


def test_a_stop_string_ends_the_answer_before_it_even_across_tokens(language_model: LanguageModel) -> None:
    whole, ids, _ = answer(language_model, PROMPT, Sampling(40, temperature=0))
    seam = len(language_model.tokenizer.decode(ids[:10]))
    stop = whole[seam - 2 : seam + 2]
    assert whole.count(stop) == 1
    text, stopped, finish = answer(language_model, PROMPT, Sampling(40, temperature=0, stops=("never", stop)))
    assert text == whole[: seam - 2]
    assert finish.reason == "stop"
    assert finish.completion_tokens == len(stopped) < 40


def test_text_that_only_began_like_a_stop_string_is_said_at_the_end(language_model: LanguageModel) -> None:
    whole, _, _ = answer(language_model, PROMPT, Sampling(10, temperature=0))
    text, _, finish = answer(language_model, PROMPT, Sampling(10, temperature=0, stops=(whole[-1] + "and more",)))
    assert (text, finish) == (whole, Finish("length", 10))


def test_a_repetition_penalty_is_applied(language_model: LanguageModel) -> None:
    plain = answer(language_model, PROMPT, Sampling(40, temperature=0))
    assert answer(language_model, PROMPT, Sampling(40, temperature=0, repetition_penalty=1.8)) != plain


def test_a_prompt_may_fill_the_context_but_for_one_token(language_model: LanguageModel) -> None:
    ids = [5] * (CONTEXT_TOKENS - 1)
    assert generate(language_model, ids, Sampling(1, temperature=0))[2] == Finish("length", 1)


def test_an_answer_can_be_cancelled_between_tokens(language_model: LanguageModel) -> None:
    cancelled, seen = threading.Event(), []

    def emit(piece: Piece) -> None:
        seen.append(piece)
        if len(seen) == 3:
            cancelled.set()

    with pytest.raises(Cancelled):
        language_model.generate([5, 6], Sampling(400, temperature=0), emit=emit, cancelled=cancelled)
    assert len(seen) == 3


def test_a_model_whose_layers_are_unknown_can_be_cancelled_between_tokens_too(checkpoint: Path) -> None:
    module: Any = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    module._no_split_modules = None
    model = LanguageModel(module, load_tokenizer(checkpoint), defaults=SamplingDefaults(()))
    test_an_answer_can_be_cancelled_between_tokens(model)


def test_an_answer_can_be_cancelled_in_the_middle_of_a_forward_pass(language_model: LanguageModel) -> None:
    cancelled = threading.Event()
    cancelled.set()
    began = []
    module: Any = language_model._module
    hook = module.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: began.append(1))
    try:
        with pytest.raises(Cancelled):
            language_model.generate([5, 6], Sampling(4), emit=lambda _: None, cancelled=cancelled)
    finally:
        hook.remove()
    assert not began


def test_after_a_cancelled_answer_the_next_is_what_it_always_is(language_model: LanguageModel) -> None:
    expected = answer(language_model, PROMPT, Sampling(20, temperature=1.0, seed=1))
    test_an_answer_can_be_cancelled_between_tokens(language_model)
    assert answer(language_model, PROMPT, Sampling(20, temperature=1.0, seed=1)) == expected


def test_pieces_come_as_the_tokens_do_and_not_at_the_end(language_model: LanguageModel) -> None:
    times: list[float] = []
    prompt = language_model.tokenizer.encode(PROMPT)
    language_model.generate(
        prompt, Sampling(30, temperature=0), emit=lambda _: times.append(time.monotonic()), cancelled=NEVER
    )
    assert len(times) >= 30
    assert times[15] - times[0] > (times[-1] - times[0]) / 10


def test_what_a_generation_config_may_ask_of_transformers_does_not_reach_it(checkpoint: Path) -> None:
    plain = built(checkpoint, SamplingDefaults(stop_ids=()))
    module: Any = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    module.generation_config.num_beams = 4
    module.generation_config.max_new_tokens = 3
    module.generation_config.bad_words_ids = [[one] for one in range(3, 200)]
    tuned = LanguageModel(module, load_tokenizer(checkpoint), defaults=SamplingDefaults(stop_ids=()))
    assert answer(tuned, PROMPT, Sampling(12, temperature=0)) == answer(plain, PROMPT, Sampling(12, temperature=0))


def test_the_context_limit_is_the_models_or_less(checkpoint: Path) -> None:
    assert built(checkpoint, SamplingDefaults(()), context_tokens=None).context_tokens == CONTEXT_TOKENS
    assert built(checkpoint, SamplingDefaults(()), context_tokens=64).context_tokens == 64
    with pytest.raises(ConfigError, match=f"more than the model's {CONTEXT_TOKENS}"):
        built(checkpoint, SamplingDefaults(()), context_tokens=CONTEXT_TOKENS + 1)


def test_a_model_that_does_not_say_how_long_its_context_is_needs_to_be_told(checkpoint: Path) -> None:
    # Bloom has no table of positions, and its config no length.
    config = transformers.BloomConfig(vocab_size=400, hidden_size=16, n_layer=1, n_head=2)
    module = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        LanguageModel(module, load_tokenizer(checkpoint), defaults=SamplingDefaults(()))
    model = LanguageModel(module, load_tokenizer(checkpoint), defaults=SamplingDefaults(()), context_tokens=100)
    assert model.context_tokens == 100


def answer(model: LanguageModel, prompt: str, sampling: Sampling) -> tuple[str, list[int], Finish]:
    return generate(model, model.tokenizer.encode(prompt), sampling)


def generate(model: LanguageModel, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[str, list[int], Finish]:
    pieces: list[Piece] = []
    emit: Callable[[Piece], None] = pieces.append
    finish = model.generate(prompt_ids, sampling, emit=emit, cancelled=NEVER)
    return "".join(piece.text for piece in pieces), [one for piece in pieces for one in piece.token_ids], finish


def built(checkpoint: Path, defaults: SamplingDefaults, *, context_tokens: int | None = None) -> LanguageModel:
    module = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    return LanguageModel(module, load_tokenizer(checkpoint), defaults=defaults, context_tokens=context_tokens)


def hot(seed: int) -> Sampling:
    return Sampling(1, temperature=100.0, seed=seed)
