"""Parity: real vLLM on weights from disk, donated, and attached after a restart of the keeper, says the same."""

import math
from typing import Any

import pytest

from tests.parity.conftest import Rows
from tests.parity.table import REAL, ROWS

PROMPTS = 20


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(name, marks=pytest.mark.model) if name == REAL else name
        for name, row in ROWS.items()
        if not (row.error or row.refusal)
    ],
)
def test_attached_weights_are_those_on_disk_and_say_the_same(rows: Rows, row: str) -> None:
    result = rows.result(row)
    assert "error" not in result, f"{result['error']}\n{rows.last_words}"
    roles = ["target", "draft"] if ROWS[row].draft not in ("", "ngram") else ["target"]
    assert result["verdicts"] == {role: ["donated", "hit"] for role in roles}
    assert result["differing"] == []
    expected: dict[str, Any] = result["disk"]
    assert len(expected["tokens"]) >= PROMPTS
    assert all(math.isfinite(one) for said in expected["logprobs"] for one in said)
    # A model that says one token for ever would say it with many other weights, too.
    assert len({token for said in expected["tokens"] for token in said}) > 10
    for engine in ("donated", "attached", *(["alone"] if ROWS[row].alone else [])):
        assert result[engine]["tokens"] == expected["tokens"], engine
        assert result[engine]["logprobs"] == expected["logprobs"], engine
        # No answer shows what a draft says.
        assert result[engine]["proposed"] == expected["proposed"], engine
        # The engine did not run on a copy of all of it. What computes may be packed anew, for this processor.
        assert result[engine]["mapped_bytes"] > 0
    assert bool(expected["proposed"]) == bool(ROWS[row].draft)
    assert "cannot be loaded anew in place" in result["reloaded"]


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.error])
def test_what_vllm_does_not_run_on_a_cpu_it_refuses_itself(rows: Rows, row: str) -> None:
    assert ROWS[row].error in rows.result(row).get("error", "")


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.refusal])
def test_what_would_write_to_attached_weights_is_refused(rows: Rows, row: str) -> None:
    assert rows.result(row).get("error", "").startswith(ROWS[row].refusal)
