"""The bodies of requests, as OpenAI's API defines them, as far as this engine can honour them.

A parameter that would change the answer and is not honoured is refused by name; what changes nothing is accepted. The
one addition is vLLM's `return_token_ids`.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from appliance.engine.refusal import Refusal

STOPS_LIMIT = 4
STOP_LENGTH_LIMIT = 1000
NAME_SHOWN_LIMIT = 100
COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's, for /v1/completions only

# What these say about an answer never reaches the model.
HARMLESS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
    | {"parallel_tool_calls"}
)
# Not honoured, and accepted with just these values, which ask for what happens anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "logprobs": (False,),
    "top_logprobs": (),
    "logit_bias": ({},),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
}
NEUTRAL_IN_MESSAGE = frozenset({"refusal", "audio", "function_call", "tool_calls", "annotations", "tool_call_id"})


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(one) is int for one in value):
        return tuple(value)
    if isinstance(value, list) and all(isinstance(one, str | list) for one in value):
        raise ValueError("one prompt for each request, please: several are not supported")
    raise ValueError("a string or a list of token ids is expected")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("a string or a list of text parts is expected")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('only parts like {"type": "text", "text": "..."} are supported')
        texts.append(part["text"])
    return "\n".join(texts)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("a string or a list of strings is expected")
    if len(stops) > STOPS_LIMIT:
        raise ValueError(f"at most {STOPS_LIMIT} stop strings are supported")
    if not all(0 < len(stop) <= STOP_LENGTH_LIMIT for stop in stops):
        raise ValueError(f"a stop string has 1 to {STOP_LENGTH_LIMIT} characters")
    return tuple(stops)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: changes no content


class Request(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def tokens_asked_for(self) -> int | None:
        return self.max_tokens

    @property
    def tokens_by_default(self) -> int | None:
        """None: as many as there is room for."""
        return None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Request):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_one_prompt)]

    @property
    def tokens_by_default(self) -> int | None:
        return COMPLETION_TOKENS_DEFAULT


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        # OpenAI renamed the role; chat templates did not.
        said = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return said if self.name is None else said | {"name": self.name}


class ChatRequest(Request):
    """The body of POST /v1/chat/completions."""

    # Only the first error is told, and collecting one for each of a million messages takes gigabytes.
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def tokens_asked_for(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


R = TypeVar("R", bound=Request)


def parse(body: bytes, schema: type[R]) -> R:
    """Return the request in a body; Refusal 400 that names the parameter on anything that cannot be honoured."""
    try:
        request = schema.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error
    _refuse_unsupported(request.model_extra or {})
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            _refuse_in_message(message.model_extra or {}, place=f"messages[{index}]")
        if None not in (request.max_tokens, request.max_completion_tokens):
            raise Refusal(
                400, "max_tokens is the old name of max_completion_tokens: give one of them", param="max_tokens"
            )
    if request.stream_options is not None and not request.stream:
        raise Refusal(400, "stream_options needs stream: true", param="stream_options")
    return request


def _refuse_unsupported(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        if name in HARMLESS:
            continue
        if name not in NEUTRAL:
            shown = name[:NAME_SHOWN_LIMIT]
            raise Refusal(400, f"{shown!r} is not a parameter of this endpoint", param=shown, code="unknown_parameter")
        if value is not None and not any(type(value) is type(one) and value == one for one in NEUTRAL[name]):
            only = f", except as {json.dumps(NEUTRAL[name][0])}" if NEUTRAL[name] else ""
            raise Refusal(400, f"{name!r} is not supported{only}", param=name, code="unsupported_parameter")


def _refuse_in_message(extra: dict[str, Any], *, place: str) -> None:
    for name, value in extra.items():
        param = f"{place}.{name[:NAME_SHOWN_LIMIT]}"
        if name not in NEUTRAL_IN_MESSAGE:
            raise Refusal(400, f"{param!r} is not part of a message", param=param, code="unknown_parameter")
        if value not in (None, []):
            raise Refusal(400, f"{param!r} is not supported", param=param, code="unsupported_parameter")


def _refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    said = first["msg"].removeprefix("Value error, ")
    if not param:
        return Refusal(400, f"the body is not a request: {said}")
    return Refusal(400, f"{param}: {said}", param=param, code="invalid_value" if first["type"] != "missing" else None)
