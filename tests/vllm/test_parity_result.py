"""A comparison goes from process to process as a line among vLLM's own, and those of replicas become one."""

from dataclasses import replace
from typing import Any

import pytest

from appliance.vllm.parity_result import Parity, merged

FIRST = Parity("m", {"target 0": "loaded"}, 640, same_tokens=True, same_logprobs=True, differing=())
SECOND = replace(FIRST, stages={"target 1": "processed"})


def test_what_is_printed_is_read_back_from_among_other_lines() -> None:
    found = replace(FIRST, differing=("target 0: model.norm.weight: other bytes",), repeatable=False)
    assert Parity.read(f"INFO of vLLM\n{FIRST.line()}\n{found.line()}\nbye\n") == found


@pytest.mark.parametrize("said", ["", "INFO of vLLM\n", '{"other": 1}\n'])
def test_where_nothing_was_found_there_is_none(said: str) -> None:
    assert Parity.read(said) is None


def test_replicas_hold_together() -> None:
    both = merged([FIRST, SECOND])
    assert both.holds
    assert (both.stages, both.tokens) == ({"target 0": "loaded", "target 1": "processed"}, 1280)


@pytest.mark.parametrize(
    "wrong", [{"same_tokens": False}, {"same_logprobs": False}, {"differing": ("target 1: lm_head: other bytes",)}]
)
def test_one_replica_that_differs_is_enough(wrong: dict[str, Any]) -> None:
    assert not merged([FIRST, replace(SECOND, **wrong)]).holds


@pytest.mark.parametrize(("tried", "expected"), [((None, None), None), ((True, True), True), ((True, False), False)])
def test_vllm_repeats_itself_where_it_does_in_every_replica(
    tried: tuple[bool | None, bool | None], expected: bool | None
) -> None:
    one, other = tried
    assert merged([replace(FIRST, repeatable=one), replace(SECOND, repeatable=other)]).repeatable is expected
