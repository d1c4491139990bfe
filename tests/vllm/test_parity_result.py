"""A comparison goes from process to process as a line among vLLM's own, and those of replicas become one."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from appliance.errors import EXIT_MISS, EXIT_RESOURCE, ApplianceError, HostError, MissError, ResourceError
from appliance.vllm.parity_result import Answers, Parity, error_of_end, merged

FIRST = Parity("m", {"target 0": "loaded"}, 640, same_tokens=True, same_logprobs=True, differing=())
SECOND = replace(FIRST, stages={"target 1": "processed"})


def test_what_is_printed_is_read_back_from_among_other_lines() -> None:
    found = replace(FIRST, differing=("target 0: model.norm.weight: other bytes",), controls=3, repeated=1)
    assert Parity.read(f"INFO of vLLM\n{FIRST.line()}\n{found.line()}\nbye\n") == found


ONE, OTHER = Answers(((1, 2), (3,)), ((-0.5, -0.25), (-1.0,))), Answers(((1, 2), (3,)), ((-0.5, -0.25), (-1.5,)))
THIRD = Answers(((1, 4), (3,)), ((-0.5, -0.75), (-1.0,)))


@dataclass(frozen=True)
class Compared:
    name: str
    stage: str
    differing: tuple[str, ...]


@pytest.mark.parametrize(
    ("own", "attached", "expected"),
    [
        ([ONE], [ONE], {"same_tokens": True, "same_logprobs": True, "repeated": 0, "agreed": 1}),
        ([ONE], [OTHER], {"same_tokens": True, "same_logprobs": False, "repeated": 0, "agreed": 0}),
        ([ONE], [THIRD], {"same_tokens": False, "same_logprobs": False, "repeated": 0, "agreed": 0}),
        ([ONE, OTHER], [OTHER, OTHER], {"same_tokens": True, "same_logprobs": True, "repeated": 0, "agreed": 2}),
        ([ONE, ONE], [OTHER, ONE], {"same_tokens": True, "same_logprobs": True, "repeated": 1, "agreed": 1}),
        ([ONE, ONE], [THIRD, OTHER], {"same_tokens": True, "same_logprobs": False, "repeated": 1, "agreed": 0}),
    ],
)
def test_answers_are_the_same_where_one_start_each_way_gave_them(
    own: list[Answers], attached: list[Answers], expected: dict[str, Any]
) -> None:
    shards = [Compared("target 0", "processed", ()), Compared("draft 0", "loaded", ("lm_head: other bytes",))]
    found = Parity.of("m", shards, own=own, attached=attached)
    assert found.stages == {"target 0": "processed", "draft 0": "loaded"}
    assert found.differing == ("draft 0: lm_head: other bytes",)
    assert (found.tokens, found.controls) == (3, len(own) - 1)
    assert {name: getattr(found, name) for name in expected} == expected


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


@pytest.mark.parametrize(
    ("controls", "repeated", "expected"), [(0, 0, None), (3, 3, True), (3, 2, False), (1, 0, False)]
)
def test_vllm_repeats_itself_where_it_always_did(controls: int, repeated: int, expected: bool | None) -> None:
    assert replace(FIRST, controls=controls, repeated=repeated).repeatable is expected


@pytest.mark.parametrize("other", [{"same_tokens": False}, {"same_logprobs": False}])
def test_other_answers_speak_against_the_weights_only_where_vllm_repeats_its_own(other: dict[str, Any]) -> None:
    found = replace(FIRST, **other)
    assert not found.holds
    assert not replace(found, controls=3, repeated=3).holds
    assert replace(found, controls=3, repeated=2).holds
    assert not replace(found, controls=3, repeated=2, differing=("target 0: lm_head: other bytes",)).holds


def test_replicas_repeat_themselves_as_often_as_all_of_them_did() -> None:
    one, other = replace(FIRST, controls=3, repeated=3), replace(SECOND, controls=3, repeated=1)
    found = merged([replace(one, agreed=4), replace(other, agreed=2)])
    assert (found.controls, found.repeated, found.repeatable, found.agreed) == (3, 1, False, 2)


def test_that_one_replica_does_not_repeat_itself_excuses_no_other() -> None:
    wrong = replace(FIRST, same_logprobs=False, controls=3, repeated=3)
    assert not merged([wrong, replace(SECOND, same_logprobs=False, controls=3, repeated=0)]).holds
    assert not merged([wrong, replace(SECOND, controls=3, repeated=0)]).holds


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (-9, ResourceError, "replica 1: not compared: it was killed, as the kernel does where host memory runs out"),
        (EXIT_RESOURCE, ResourceError, "replica 1: not compared; what is wrong is said above"),
        (EXIT_MISS, MissError, "said above"),
        (1, HostError, "vLLM ended with status 1"),
        (-11, HostError, "vLLM ended with status -11"),
    ],
)
def test_a_process_that_found_nothing_is_told_by_how_it_ended(
    status: int, kind: type[ApplianceError], said: str
) -> None:
    error = error_of_end(status, "replica 1")
    assert type(error) is kind
    assert said in error.message
