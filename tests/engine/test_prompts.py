"""What the model is asked: a request's own settings first, then the checkpoint's, then OpenAI's."""

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.engine.answer import Sampling
from appliance.engine.api import ChatRequest, CompletionRequest
from appliance.engine.configs import SamplingDefaults
from appliance.engine.prompts import Prompts
from appliance.engine.refusal import Refusal

RECOMMENDED = SamplingDefaults((), temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)


def test_without_any_word_an_answer_is_sampled_from_everything() -> None:
    assert prompts(SamplingDefaults(())).sampling(completion(max_tokens=5), 10) == Sampling(5, 1.0, 1.0, 0, 1.0)


def test_what_a_checkpoint_recommends_holds_where_a_request_is_silent() -> None:
    assert prompts(RECOMMENDED).sampling(completion(max_tokens=5), 10) == Sampling(5, 0.6, 0.9, 20, 1.1)


def test_a_requests_own_settings_come_first_even_where_they_are_zero() -> None:
    asked = completion(max_tokens=5, temperature=0.0, top_p=0.0, seed=0, stop=["x"])
    assert prompts(RECOMMENDED).sampling(asked, 10) == Sampling(5, 0.0, 0.0, 20, 1.1, 0, ("x",))


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(10, 16), (84, 16), (90, 10), (99, 1)])
def test_a_default_number_of_tokens_gives_way_to_the_context(prompt_tokens: int, expected: int) -> None:
    assert prompts(RECOMMENDED).sampling(completion(), prompt_tokens).max_tokens == expected


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(100, None), (500, None), (99, 2), (100, 1), (1, 100)])
def test_what_does_not_fit_the_context_is_refused_with_the_numbers(prompt_tokens: int, max_tokens: int | None) -> None:
    with pytest.raises(Refusal, match=f"context is 100 tokens; the request needs {prompt_tokens}") as caught:
        prompts(RECOMMENDED).sampling(completion(max_tokens=max_tokens), prompt_tokens)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_chat_may_use_all_the_room_there_is() -> None:
    asked = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert prompts(RECOMMENDED).sampling(asked, 30).max_tokens == 70


def prompts(defaults: SamplingDefaults) -> Prompts:
    model: Any = SimpleNamespace(defaults=defaults, context_tokens=100)
    return Prompts(model)


def completion(**settings: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x"} | settings)
