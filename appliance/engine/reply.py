"""Puts an answer into the JSON that OpenAI's clients read, whole or in chunks."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from appliance.engine.answer import Finish


class Reply:
    """The fields that every part of one answer carries, and how its text is wrapped. A subclass is one endpoint's."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, prompt_ids: Sequence[int], *, with_usage: bool, with_ids: bool) -> None:
        """`with_usage`: a stream ends with a chunk of counts. `with_ids`: token ids are shown beside the text."""
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self._model = model
        self._created = int(time.time())
        self._prompt_ids = prompt_ids
        self._with_usage = with_usage
        self._with_ids = with_ids

    def whole(self, text: str, token_ids: Sequence[int], finish: Finish) -> dict[str, Any]:
        choice = self._choice(self._content(text), token_ids, finish.reason)
        reply = self._enveloped(self.whole_object, [choice | self._prompt_in_choice()])
        return reply | self._prompt_in_reply() | {"usage": self._usage(finish)}

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream says before the first token."""
        return []

    def chunk(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        return self._chunk([self._choice(self._delta(text), token_ids, None)])

    def last_chunks(self, finish: Finish) -> list[dict[str, Any]]:
        chunks = [self._chunk([self._choice(self._delta(""), (), finish.reason)])]
        if self._with_usage:
            chunks.append(self._chunk([]) | {"usage": self._usage(finish)})
        return chunks

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _prompt_in_choice(self) -> dict[str, Any]:
        return {}

    def _prompt_in_reply(self) -> dict[str, Any]:
        return {}

    def _choice(self, content: dict[str, Any], token_ids: Sequence[int], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0} | content | {"logprobs": None, "finish_reason": reason}
        return choice | {"token_ids": list(token_ids)} if self._with_ids else choice

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._enveloped(self.chunk_object, choices)
        return chunk | {"usage": None} if self._with_usage else chunk

    def _enveloped(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self, finish: Finish) -> dict[str, int]:
        prompt, completion = len(self._prompt_ids), finish.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class CompletionReply(Reply):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _content

    def _prompt_in_choice(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompt_ids)} if self._with_ids else {}


class ChatReply(Reply):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([self._choice(delta, (), None)]) | self._prompt_in_reply()]

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _prompt_in_reply(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompt_ids)} if self._with_ids else {}


def event_bytes(data: dict[str, Any] | str) -> bytes:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "backslashreplace") + b"\n\n"
