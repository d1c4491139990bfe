"""What a source makes of vLLM's own configurations: which shard is asked for, and what stays in memory."""

import json
from typing import Any

import pytest

from appliance.errors import EXIT_MISS, EXIT_RESOURCE
from tests.vllm import vllm_process


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("sources"))
    return json.loads(vllm_process.run("-m", "tests.vllm.sources", folder, timeout_s=200).splitlines()[-1])


def test_a_module_that_is_not_served_leaves_nothing_in_memory(said: Any) -> None:
    # Experts are layers that vLLM looks up by name: whoever enters them keeps the largest part of a mixture.
    unclaimed = said["unclaimed"]
    assert unclaimed["claimed"] > 0, "or there was nothing to keep"
    assert (unclaimed["layers"], unclaimed["entered"], unclaimed["alive"]) == (0, [], False)


def test_a_small_draft_has_the_rank_of_its_replicas_target(said: Any) -> None:
    assert said["ranks"] == {"target": 1, "draft": 1}


def test_a_loader_does_not_process_what_it_never_computes_with(said: Any) -> None:
    # Post-processing may need as much memory as the weights do.
    assert said["processed"] == {"engine": 1, "loader": 0, "mixture": 1}


def test_what_vllm_quantizes_while_it_loads_is_finished_once_all_of_it_is_read(said: Any) -> None:
    assert said["finished later"] == {"True": ["read", "finished"], "False": ["read"]}


def test_an_engine_that_asks_for_the_size_of_weights_in_vain_says_why_it_ends(said: Any) -> None:
    (refusal,) = said["refusals"]["outcomes"]
    assert (refusal["verdict"], refusal["exit_status"] in (EXIT_MISS, EXIT_RESOURCE)) == ("refused", True)
    assert "none.sock" in refusal["error"]


def test_an_engine_that_waits_for_a_keeper_that_is_not_there_says_so_first(said: Any) -> None:
    first, *_ = said["refusals"]["said"]
    assert "none.sock yet: waiting for it for up to 0 s" in first


def test_vllm_is_told_how_much_of_its_own_device_weights_take_already_and_a_loader_nothing(said: Any) -> None:
    external = said["external"]
    assert external["there"] > 0
    assert (external["engine"], external["loader"]) == (external["there"], 0)


def test_facts_are_those_of_the_configuration_before_anything_changes_it(said: Any) -> None:
    before, after = said["facts"]
    assert before["model.max_len"] == "256"
    assert after == before
