"""Where vLLM fails for a reason that an operator can act on, what we run it in ends with that reason."""

import json
from typing import Any

import pytest

from appliance.errors import EXIT_CONFIG, EXIT_MISS, EXIT_RESOURCE
from tests.vllm import vllm_process


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("failures"))
    return json.loads(vllm_process.run("-m", "tests.vllm.failures", folder, timeout_s=200).splitlines()[-1])


def test_a_comparison_without_memory_ends_with_75_whichever_engine_wants_it(said: Any) -> None:
    assert said["parity"]["from disk"] == EXIT_RESOURCE
    assert said["parity"]["attached"] == EXIT_RESOURCE


def test_a_comparison_ends_with_what_a_rank_says_is_wrong(said: Any) -> None:
    assert said["parity"]["in a worker"] == EXIT_MISS


def test_what_nobody_can_act_on_keeps_its_traceback(said: Any) -> None:
    assert said["parity"]["bug"] == "RuntimeError('a bug')"


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ("unknown", "unrecognized arguments: --no-such-option"),
        ("no number", "--max-num-seqs"),
        ("no choice", "fp7"),
        ("beside others", "max_model_len"),
    ],
)
def test_arguments_that_vllm_refuses_are_the_operators_to_change(said: Any, refused: str, words: str) -> None:
    loader_status, error, server_status = said["refused arguments"][refused]
    assert (loader_status, server_status) == (EXIT_CONFIG, EXIT_CONFIG)
    assert words in error
    assert "change engine.args" in error


def test_a_rank_that_has_no_memory_for_weights_says_so_to_whoever_started_vllm(said: Any) -> None:
    attaching = said["attaching"]
    assert (attaching["raised"], attaching["exit_status"]) == (EXIT_RESOURCE, EXIT_RESOURCE)
    assert "GPU memory ran out: CUDA out of memory" in attaching["error"]


def test_a_rank_that_has_no_memory_for_a_second_copy_names_itself(said: Any) -> None:
    comparing = said["comparing"]
    assert (comparing["raised"], comparing["exit_status"], comparing["rank"]) == (EXIT_RESOURCE, EXIT_RESOURCE, 3)
    assert comparing["error"].startswith("target rank 3: loading once more beside what is attached: host memory ran")


def test_a_loader_starts_no_vllm_that_would_load_by_another_format(said: Any) -> None:
    assert said["loading"]["appliance"] == {"started": 1}
    refused = said["loading"]["bitsandbytes"]
    assert (refused["started"], refused["exit_status"]) == (0, EXIT_CONFIG)
    assert "`bitsandbytes`" in refused["error"]


def test_a_gpu_with_more_room_than_vllm_has_measured_is_told_before_vllm_ends_over_it(said: Any) -> None:
    assert "start it again" in said["replaced"]["larger"]
    assert "start it again" not in said["replaced"]["as large"]


def test_an_engine_that_nobody_of_ours_has_started_tells_its_verdict_itself(said: Any) -> None:
    assert "weights: donated (" in said["replaced"]["as large"]
    assert "target rank 0); model_load" in said["replaced"]["as large"]


def test_every_method_that_is_refused_is_one_of_vllms_worker(said: Any) -> None:
    # The last one came with 0.32.
    assert set(said["unknown writers"]) <= {"reset_weights"}
