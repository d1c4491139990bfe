"""Bodies of requests: what is honoured, what is refused and by which name."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.api import NEUTRAL, ChatRequest, CompletionRequest, Request, parse
from appliance.engine.refusal import Refusal

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hello"}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"top_k": 5}, "top_k"),
        ({"temprature": 0}, "temprature"),
        ({"x" * 5000: 1}, "x" * 100),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunky": 1}}, "stream_options.chunky"),
        ({"stream": 1}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": ["x"] * 5000}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"model": None}, "model"),
        ({"model": ["m"]}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*CHAT["messages"], {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    refusal = refused(json.dumps(CHAT | changes).encode(), ChatRequest)
    assert (refusal.status, refusal.param, refusal.kind) == (400, param, "invalid_request_error")
    assert param.rpartition(".")[2] in refusal.message
    assert len(refusal.message) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "logprobs": False},
        dict.fromkeys(NEUTRAL),
        {"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": True},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"temperature": None, "top_p": None, "seed": None, "stop": None, "max_tokens": None, "stream": None},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}]},
    ],
)
def test_what_changes_nothing_is_accepted(changes: dict[str, Any]) -> None:
    asked = parse(json.dumps(CHAT | changes).encode(), ChatRequest)
    assert (asked.temperature, asked.top_p, asked.seed, asked.stop, asked.tokens_asked_for) == (None,) * 3 + ((), None)


def test_the_parts_of_a_message_are_its_lines() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": content, "name": "ann"}]
    asked = parse(json.dumps(CHAT | {"messages": messages}).encode(), ChatRequest)
    assert [message.for_template() for message in asked.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo", "name": "ann"},
    ]


@pytest.mark.parametrize("prompt", ["hello", ["hello"]])
def test_a_prompt_is_a_text(prompt: object) -> None:
    assert parse(json.dumps(TEXT | {"prompt": prompt}).encode(), CompletionRequest).prompt == "hello"


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_may_be_token_ids(prompt: object) -> None:
    assert parse(json.dumps(TEXT | {"prompt": prompt}).encode(), CompletionRequest).prompt == (1, 2)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], [True], [1.5], {}, None, 5, [None], [["a"]]])
def test_any_other_prompt_is_refused(prompt: object) -> None:
    assert refused(json.dumps(TEXT | {"prompt": prompt}).encode(), CompletionRequest).param == "prompt"


def test_each_endpoint_has_its_own_number_of_tokens_by_default() -> None:
    assert parse(json.dumps(TEXT).encode(), CompletionRequest).tokens_by_default == 16
    assert parse(json.dumps(CHAT).encode(), ChatRequest).tokens_by_default is None
    assert parse(json.dumps(CHAT | {"max_completion_tokens": 3}).encode(), ChatRequest).tokens_asked_for == 3
    assert parse(json.dumps(CHAT | {"max_tokens": 3}).encode(), ChatRequest).tokens_asked_for == 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe\x00",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800", "messages": []}',
        b"{}{}",
        b"\x00" * 50,
        b'{"seed": ' + b"9" * 10_000 + b"}",
    ],
)
def test_a_body_that_is_not_json_is_refused_as_such(body: bytes) -> None:
    refusal = refused(body, ChatRequest)
    assert (refusal.status, refusal.code) == (400, "invalid_json")
    assert refusal.message.startswith("the body is not JSON: ")


@pytest.mark.parametrize("body", [b"null", b"[]", b"5", b'"x"', b"true"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert "not a request" in refused(body, ChatRequest).message


@pytest.mark.parametrize("one", [b"0", b"[]", b'{"role":"u"}', b'{"role":"user","content":[0]}'])
def test_a_million_errors_cost_no_more_than_one(one: bytes) -> None:
    body = b'{"model":"m","messages":[' + b",".join([one] * (2_000_000 // (len(one) + 1))) + b"]}"
    tracemalloc.start()
    try:
        refusal = refused(body, ChatRequest)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(body)
    finally:
        tracemalloc.stop()
    assert refusal.param is not None
    assert refusal.param.startswith("messages[0]")


@given(body=st.binary(max_size=60))
def test_random_bytes_end_in_a_refusal(body: bytes) -> None:
    assert refused(body, CompletionRequest).status == 400


@given(name=st.sampled_from([*CHAT, *NEUTRAL, "stop", "seed", "stream_options", "max_tokens"]), value=anything)
def test_random_values_end_in_a_request_or_in_a_refusal_that_can_be_written(name: str, value: object) -> None:
    for schema, plain in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        try:
            parse(json.dumps(plain | {name: value}).encode(), schema)
        except Refusal as refusal:
            assert json.loads(refusal.body_bytes())["error"]["type"] == "invalid_request_error"


def refused(body: bytes, schema: type[Request]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(body, schema)
    return caught.value
