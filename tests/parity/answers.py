"""What an engine says with an adapter, and where prompts begin alike; appliance/vllm/parity.py has the plain case."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance.vllm.parity import MAX_TOKENS, PROMPTS
from appliance.vllm.parity_result import Answers
from tests.parity.mappings import runner_of

PREFIX = " ".join(PROMPTS[:4])


def adapted_answers(llm: Any, adapter: Path) -> Answers:
    """Return the greedy answers to PROMPTS without the adapter and then with it: both use the same weights."""
    from vllm.lora.request import LoRARequest

    plain = _outputs(llm, PROMPTS)
    adapted = _outputs(llm, PROMPTS, lora_request=LoRARequest("adapter", 1, str(adapter)))
    assert _answers(plain).tokens != _answers(adapted).tokens
    return _answers([*plain, *adapted])


def prefixed_answers(llm: Any) -> Answers:
    """Return the answers to prompts that begin alike; AssertionError if that is computed again for each."""
    _outputs(llm, [PREFIX])
    outputs = _outputs(llm, [f"{PREFIX} {prompt}" for prompt in PROMPTS])
    assert all(output.num_cached_tokens > 0 for output in outputs)
    return _answers(outputs)


def proposals(llm: Any) -> list[Any]:
    """Return a list of what an engine's draft proposes from now on: a list of token ids for each request and step."""
    drafter = getattr(runner_of(llm), "drafter", None)
    found: list[Any] = []
    if drafter is not None:
        propose = drafter.propose

        def proposed(*arguments: Any, **options: Any) -> Any:
            tokens = propose(*arguments, **options)
            found.append(tokens if isinstance(tokens, list) else tokens.tolist())
            return tokens

        drafter.propose = proposed
    return found


def _outputs(llm: Any, prompts: Sequence[str], **options: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)
    return list(llm.generate(list(prompts), sampling, use_tqdm=False, **options))


def _answers(outputs: Sequence[Any]) -> Answers:
    said = [output.outputs[0] for output in outputs]
    return Answers(
        tuple(tuple(one.token_ids) for one in said),
        tuple(
            tuple(step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)) for one in said
        ),
    )
