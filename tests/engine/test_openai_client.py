"""The API as OpenAI's own client sees it, against the real server and a real (random) model."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.engine.answer import Sampling
from appliance.engine.configs import SamplingDefaults
from appliance.engine.generation import LanguageModel
from appliance.engine.model import load
from appliance.engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.checkpoints import CONTEXT_TOKENS, read_tensors
from tests.engine.serving import NAME, Served, serving
from tests.engine.test_generation import answer

PROMPT = "The weights stay while"
QUESTION: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "größer? 🙂"}]
IDS = {"return_token_ids": True}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def test_models_are_listed_and_looked_up(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "appliance"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_what_the_model_says(client: openai.OpenAI, language_model: LanguageModel) -> None:
    text, ids, finish = answer(language_model, PROMPT, Sampling(30, temperature=0))
    said = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=30, temperature=0, extra_body=IDS)
    choice: Any = said.choices[0]
    assert (choice.text, choice.token_ids, choice.finish_reason) == (text, ids, finish.reason)
    assert choice.prompt_token_ids == language_model.tokenizer.encode(PROMPT)
    assert said.object == "text_completion"
    assert said.usage is not None
    prompt_tokens = len(language_model.tokenizer.encode(PROMPT))
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (prompt_tokens, 30)
    assert said.usage.total_tokens == prompt_tokens + 30


def test_a_prompt_of_token_ids_is_the_same_prompt(client: openai.OpenAI, language_model: LanguageModel) -> None:
    ids = language_model.tokenizer.encode(PROMPT)
    by_text, by_ids, by_list = (
        client.completions.create(model=NAME, prompt=prompt, max_tokens=20, temperature=0).choices[0].text
        for prompt in (PROMPT, ids, [PROMPT])
    )
    assert by_text == by_ids == by_list


def test_a_conversation_is_answered(client: openai.OpenAI, language_model: LanguageModel) -> None:
    said: Any = client.chat.completions.create(
        model=NAME, messages=QUESTION, max_completion_tokens=25, temperature=0, extra_body=IDS
    )
    prompt = language_model.tokenizer.encode_chat(QUESTION)
    assert said.prompt_token_ids == prompt
    assert said.choices[0].message.role == "assistant"
    assert said.choices[0].finish_reason == "length"
    assert len(said.choices[0].token_ids) == said.usage.completion_tokens == 25
    # What came back can be sent again.
    again = client.chat.completions.create(
        model=NAME, messages=[*QUESTION, said.choices[0].message, {"role": "user", "content": "more"}], max_tokens=2
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens > len(prompt) + 20


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    whole: Any = client.chat.completions.create(
        model=NAME, messages=QUESTION, max_tokens=60, temperature=0, extra_body=IDS
    )
    chunks: list[Any] = list(
        client.chat.completions.create(
            model=NAME,
            messages=QUESTION,
            max_tokens=60,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=IDS,
        )
    )
    *spoken, last, counts = chunks
    assert (spoken[0].choices[0].delta.role, spoken[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == whole.choices[0].message.content
    assert [one for chunk in spoken for one in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert {chunk.choices[0].finish_reason for chunk in spoken} == {None}
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert (counts.choices, counts.usage) == ([], whole.usage)
    assert {chunk.usage for chunk in (*spoken, last)} == {None}
    assert {(chunk.id, chunk.object, chunk.model) for chunk in chunks} == {
        (chunks[0].id, "chat.completion.chunk", NAME)
    }


def test_a_completion_streams_too_and_without_counts_unless_asked(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, temperature=0)
    chunks = list(client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 10


def test_stop_strings_end_both_kinds_of_answer_alike(client: openai.OpenAI) -> None:
    text = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, temperature=0).choices[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    for stops in (stop, [stop], ["never", stop]):
        whole = client.completions.create(**asked, stop=stops)
        assert whole.choices[0].text == text[: text.index(stop)]
        assert whole.choices[0].finish_reason == "stop"
        chunks = list(client.completions.create(**asked, stop=stops, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_makes_an_answer_repeatable_among_others(client: openai.OpenAI) -> None:
    def say(seed: int | None) -> str | None:
        said = client.chat.completions.create(
            model=NAME, messages=QUESTION, max_tokens=20, temperature=1.5, top_p=0.95, seed=seed
        )
        return said.choices[0].message.content

    first, _, other, again = say(11), say(None), say(12), say(11)
    assert first == again != other


def test_tokens_by_default_are_few_for_a_completion_and_all_there_is_room_for_in_a_chat(
    client: openai.OpenAI, checkpoint: Path
) -> None:
    assert usage(client.completions.create(model=NAME, prompt=PROMPT, temperature=0)).completion_tokens == 16
    endless = LanguageModel(
        load(checkpoint, read_tensors(checkpoint), dtype="auto"),
        WithoutEnd(load_tokenizer(checkpoint)._tokenizer),
        defaults=SamplingDefaults(()),
        context_tokens=80,
    )
    with serving(endless) as server, client_of(server) as other:
        counts = usage(other.chat.completions.create(model=NAME, messages=QUESTION, temperature=0))
        assert counts.total_tokens == 80
        ids = endless.tokenizer.encode(PROMPT)
        almost = usage(other.completions.create(model=NAME, prompt=(ids * 20)[:75], temperature=0))
        assert almost.completion_tokens == 5


def test_sampling_defaults_of_the_checkpoint_apply_where_a_request_is_silent(checkpoint: Path) -> None:
    defaults = SamplingDefaults((), temperature=0.0)
    module = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    greedy = LanguageModel(module, load_tokenizer(checkpoint), defaults=defaults)
    with serving(greedy) as server, client_of(server) as client:
        silent = client.completions.create(model=NAME, prompt=PROMPT).choices[0].text
        explicit, hot = (
            client.completions.create(model=NAME, prompt=PROMPT, temperature=temperature).choices[0].text
            for temperature in (0.0, 2.0)
        )
        assert silent == explicit != hot


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"model": "gpt-5"}, "model", "model_not_found"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": CONTEXT_TOKENS}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", None),
        ({"extra_body": {"top_k": 3}}, "top_k", "unknown_parameter"),
    ],
)
def test_what_is_refused_arrives_as_the_clients_own_error(
    client: openai.OpenAI, changes: dict[str, Any], param: str, code: str | None
) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": QUESTION, "max_tokens": 5} | changes
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**asked)
    error = caught.value
    assert isinstance(error, openai.NotFoundError if param == "model" else openai.BadRequestError)
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")


@pytest.mark.parametrize("prompt", ["", [], [[]], [-1], [10**9], [385]])
def test_a_prompt_that_is_no_prompt_is_refused(client: openai.OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt=prompt)
    assert caught.value.param == "prompt"


def test_without_a_chat_template_a_chat_is_refused_with_a_way_out(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    tokenizer._tokenizer.chat_template = None
    module = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    model = LanguageModel(module, tokenizer, defaults=SamplingDefaults(()))
    with serving(model) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="/v1/completions") as caught:
            client.chat.completions.create(model=NAME, messages=QUESTION)
        assert caught.value.code == "no_chat_template"


def test_many_clients_at_once_each_get_their_own_answer(served: Served, language_model: LanguageModel) -> None:
    prompts = [f"{number}: the engine" for number in range(12)]

    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:

            async def whole(prompt: str) -> str:
                said = await client.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0)
                return said.choices[0].text

            async def streamed(prompt: str) -> str:
                stream = await client.completions.create(
                    model=NAME, prompt=prompt, max_tokens=12, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            ways = [whole, streamed]
            return list(await asyncio.gather(*(ways[n % 2](prompt) for n, prompt in enumerate(prompts))))

    said = asyncio.run(scenario())
    assert said == [answer(language_model, prompt, Sampling(12, temperature=0))[0] for prompt in prompts]


def test_a_streams_bytes_are_text_at_every_line(served: Served) -> None:
    body = {"model": NAME, "prompt": "重みは残る。🙂", "max_tokens": 80, "temperature": 1.5, "seed": 4, "stream": True}
    reply = served.ask("POST", "/v1/completions", body)
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *events, done, end = reply.body.decode("utf-8").split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


class WithoutEnd(Tokenizer):
    """A tokenizer that knows no end token."""

    end_id = None


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=30)


def usage(said: Any) -> Any:
    assert said.usage is not None
    return said.usage
