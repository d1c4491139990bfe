"""Generates the answer to one prompt, token by token, with transformers' own `generate`.

One call at a time: the caller (the worker) sees to that. What a call leaves behind is nothing, the random state
included, so an answer depends on its own request only.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from appliance.engine.answer import Cancelled, Finish, Piece, Sampling
from appliance.engine.configs import SamplingDefaults
from appliance.engine.detokenizer import Detokenizer
from appliance.engine.stops import StopScanner
from appliance.engine.tokenizer import Tokenizer
from appliance.errors import ConfigError


class LanguageModel:
    """A module with its tokenizer, ready to answer."""

    def __init__(
        self,
        module: torch.nn.Module,
        tokenizer: Tokenizer,
        *,
        defaults: SamplingDefaults,
        context_tokens: int | None = None,
    ) -> None:
        """`context_tokens` limits prompt and answer together; None takes the limit from the model's config.

        ConfigError if neither says anything, or if the limit is more than the model was made for.
        """
        self._module: Any = module
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.context_tokens = _settled_context(self._module.config, context_tokens)
        self.vocabulary_size: int = self._embeddings().shape[0]
        ends = dict.fromkeys(defaults.stop_ids)
        if tokenizer.end_id is not None:
            ends[tokenizer.end_id] = None
        self._end_ids = tuple(ends)
        # Everything else that a checkpoint's generation_config.json may ask for (beams, caches, assistants) would reach
        # `generate` behind the request's back from here.
        self._module.generation_config = GenerationConfig()
        self._cancelled = threading.Event()
        self._let_forward_passes_be_cancelled()

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        emit: Callable[[Piece], None],
        cancelled: threading.Event,
    ) -> Finish:
        """Call `emit` for every token and return why the answer ended; Cancelled soon after `cancelled` is set.

        The prompt is not empty, its ids are below `vocabulary_size`, and with max_tokens it fits `context_tokens`.
        """
        self._cancelled = cancelled
        device = self._embeddings().device
        prompt = torch.tensor([list(prompt_ids)], dtype=torch.long, device=device)
        progress = _Progress(emit, self.tokenizer, sampling.stops, end_ids=self._end_ids, cancelled=cancelled)
        with _own_random_state(sampling, device):
            self._module.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation_config(sampling),
                stopping_criteria=StoppingCriteriaList([_EachToken(progress)]),
            )
        return progress.finish()

    def _generation_config(self, sampling: Sampling) -> Any:
        pad = self.defaults.pad_id if self.defaults.pad_id is not None else next(iter(self._end_ids), 0)
        settings: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "eos_token_id": list(self._end_ids) or None,
            "pad_token_id": pad,
            "use_cache": True,
            "repetition_penalty": sampling.repetition_penalty,
            "do_sample": not sampling.is_greedy,
        }
        if not sampling.is_greedy:
            # Left out, top_k would be 50.
            settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return GenerationConfig(**settings)

    def _let_forward_passes_be_cancelled(self) -> None:
        """The forward pass over a long prompt takes as long as many tokens: look at the flag before each layer."""

        def stop_if_cancelled(*_: object) -> None:
            if self._cancelled.is_set():
                raise Cancelled

        layers = set(self._module._no_split_modules or ())
        for module in self._module.modules():
            if type(module).__name__ in layers:
                module.register_forward_pre_hook(stop_if_cancelled)

    def _embeddings(self) -> torch.Tensor:
        weight: torch.Tensor = self._module.get_input_embeddings().weight
        return weight


class _Progress:
    """The answer so far: takes each token as it is chosen and says whether the answer is complete."""

    def __init__(
        self,
        emit: Callable[[Piece], None],
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        *,
        end_ids: Sequence[int],
        cancelled: threading.Event,
    ) -> None:
        self._emit = emit
        self._detokenizer = Detokenizer(tokenizer.decode)
        self._stops = StopScanner(stops)
        self._end_ids = frozenset(end_ids)
        self._cancelled = cancelled
        self._tokens = 0
        self._ended = False

    def take(self, token_id: int) -> bool:
        if self._cancelled.is_set():
            raise Cancelled
        self._tokens += 1
        self._ended = token_id in self._end_ids
        text = "" if self._ended else self._stops.push(self._detokenizer.push(token_id))
        self._emit(Piece(text, (token_id,)))
        return self._ended or self._stops.found

    def finish(self) -> Finish:
        rest = self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        if rest:
            self._emit(Piece(rest))
        return Finish("stop" if self._ended or self._stops.found else "length", self._tokens)


class _EachToken(StoppingCriteria):  # type: ignore[misc]  # transformers is untyped
    """The one place that transformers calls after each token, before it decides to go on."""

    def __init__(self, progress: _Progress) -> None:
        self._progress = progress

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        complete = self._progress.take(int(input_ids[0, -1]))
        return torch.full((input_ids.shape[0],), complete, dtype=torch.bool, device=input_ids.device)


@contextlib.contextmanager
def _own_random_state(sampling: Sampling, device: torch.device) -> Iterator[None]:
    """Sampling draws from torch's global generators: seed them for this answer and put them back afterwards."""
    if sampling.is_greedy:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(sampling.seed if sampling.seed is not None else secrets.randbits(63))
        yield


def _settled_context(config: Any, context_tokens: int | None) -> int:
    trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    if type(trained) is not int or trained < 2:
        trained = None
    if context_tokens is None:
        if trained is None:
            raise ConfigError(
                "config.json: max_position_embeddings: missing, so nothing says how long a context may be",
                hint="set the context length of this model",
            )
        return trained
    if trained is not None and context_tokens > trained:
        raise ConfigError(f"a context of {context_tokens} tokens is more than the model's {trained}")
    return context_tokens
