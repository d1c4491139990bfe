"""A real small language model behind the real server: it answers, streamed or whole, what transformers says it does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from appliance.engine.configs import load_sampling_defaults
from appliance.engine.generation import LanguageModel
from appliance.engine.model import load
from appliance.engine.tokenizer import load_tokenizer
from tests.engine.checkpoints import quiet, read_tensors
from tests.engine.serving import serving

pytestmark = pytest.mark.model
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
NAME = "smollm2"


@pytest.fixture
def client(model_checkpoint: Path) -> Iterator[openai.OpenAI]:
    module = load(model_checkpoint, read_tensors(model_checkpoint), dtype="auto")
    defaults = load_sampling_defaults(model_checkpoint)
    model = LanguageModel(module, load_tokenizer(model_checkpoint), defaults=defaults)
    with (
        serving(model, name=NAME) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0, timeout=120) as client,
    ):
        yield client


def test_it_knows_the_capital_of_france_whole_and_streamed(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=20)
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == (
        "The capital of France is Paris.",
        "stop",
    )
    stream = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=20, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == "The capital of France is Paris."
    assert len([piece for piece in pieces if piece]) > 5


def test_its_tokens_are_those_of_transformers(client: openai.OpenAI, model_checkpoint: Path) -> None:
    said: Any = client.chat.completions.create(
        model=NAME, messages=QUESTION, temperature=0, max_tokens=20, extra_body={"return_token_ids": True}
    )
    with quiet():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model_checkpoint, dtype=torch.bfloat16)
    prompt = torch.tensor([said.prompt_token_ids])
    output = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
    assert said.choices[0].token_ids == output[0, prompt.shape[1] :].tolist()


def test_it_stops_where_it_is_told_to(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=20, stop=" Paris")
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == ("The capital of France is", "stop")
