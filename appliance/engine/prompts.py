"""Turns a request into what the model is asked: the ids of its prompt, and how to choose and when to stop."""

from typing import TYPE_CHECKING

from appliance.engine.answer import Sampling
from appliance.engine.api import ChatRequest, CompletionRequest, Request
from appliance.engine.refusal import Refusal
from appliance.engine.tokenizer import ChatTemplateRefusal

if TYPE_CHECKING:
    from appliance.engine.generation import LanguageModel


class Prompts:
    """Prompts for one model. Every method raises Refusal 400 on what the model cannot be asked."""

    def __init__(self, model: "LanguageModel") -> None:
        self._model = model

    def of_completion(self, asked: CompletionRequest) -> list[int]:
        """Return the ids of a plain prompt. Slow for a long one."""
        if isinstance(asked.prompt, str):
            ids = self._model.tokenizer.encode(asked.prompt)
        else:
            ids = list(asked.prompt)
            if not all(0 <= one < self._model.vocabulary_size for one in ids):
                raise Refusal(400, f"a token id is from 0 to {self._model.vocabulary_size - 1}", param="prompt")
        if not ids:
            raise Refusal(400, "the prompt is empty", param="prompt")
        return ids

    def of_chat(self, asked: ChatRequest) -> list[int]:
        """Return the ids of a conversation in the checkpoint's own template. Slow for a long one."""
        tokenizer = self._model.tokenizer
        if not tokenizer.has_chat_template:
            raise Refusal(
                400, "this model's checkpoint has no chat template; use /v1/completions", code="no_chat_template"
            )
        try:
            ids = tokenizer.encode_chat([message.for_template() for message in asked.messages])
        except ChatTemplateRefusal as refusal:
            raise Refusal(400, f"the chat template refuses the messages: {refusal}", param="messages") from refusal
        if not ids:
            raise Refusal(400, "the chat template makes nothing of the messages", param="messages")
        return ids

    def sampling(self, asked: Request, prompt_tokens: int) -> Sampling:
        """Return the request's settings, the checkpoint's where it has none, OpenAI's where neither has."""
        context = self._model.context_tokens
        room = context - prompt_tokens
        wanted = asked.tokens_asked_for
        if room < 1 or (wanted is not None and wanted > room):
            answer = "" if wanted is None else f" and {wanted} for the answer"
            raise Refusal(
                400,
                f"this model's context is {context} tokens; the request needs {prompt_tokens} for the prompt{answer}",
                param="messages" if isinstance(asked, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        defaults = self._model.defaults
        return Sampling(
            max_tokens=wanted if wanted is not None else min(room, asked.tokens_by_default or room),
            temperature=_first(asked.temperature, defaults.temperature, 1.0),
            top_p=_first(asked.top_p, defaults.top_p, 1.0),
            top_k=defaults.top_k or 0,
            repetition_penalty=_first(defaults.repetition_penalty, 1.0),
            seed=asked.seed,
            stops=asked.stop,
        )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
