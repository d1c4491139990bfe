"""`appliance demo`, whole, on the real model: what it promises is what it shows."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def done(model_checkpoint: Path) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "appliance", "demo", "--json"]
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=800)


@pytest.fixture(scope="module")
def found(done: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, object]]:
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_the_answer_is_the_same_through_restarts_and_the_keepers_death(found: dict[str, dict[str, object]]) -> None:
    answers = found["answers"]
    assert {answers[when] for when in ("from disk", "attached", "keeper killed", "after the kill")} == {ANSWER}


def test_zeroed_values_under_untouched_headers_are_refused_by_file(found: dict[str, dict[str, object]]) -> None:
    assert "model-00003-of-00003.safetensors is not the file that was signed" in str(found["refusal"])


def test_the_newly_signed_checkpoint_is_loaded_and_answers_otherwise(found: dict[str, dict[str, object]]) -> None:
    assert len(set(found["root_digests"])) == 2
    assert found["answers"]["new checkpoint"] != ANSWER


def test_a_warm_restart_reads_no_weights_and_takes_less_than_a_cold_start(found: dict[str, dict[str, object]]) -> None:
    figures, phases = found["figures"], found["phases_s"]["warm restart"]
    assert isinstance(phases, dict)
    assert {"verify", "build", "pack"}.isdisjoint(phases)
    assert float(str(figures["attach_s"])) > 0
    assert float(str(figures["warm_restart_s"])) < float(str(figures["cold_start_s"]))


def test_each_process_speaks_under_its_own_name(done: "subprocess.CompletedProcess[str]") -> None:
    for unit in ("weights@smollm2", "engine@smollm2"):
        assert any(line.startswith(f"{unit}") and " | " in line for line in done.stderr.splitlines()), done.stderr[
            :2000
        ]


def test_nothing_is_left_behind(done: "subprocess.CompletedProcess[str]") -> None:
    assert list(Path(tempfile.gettempdir()).glob("appliance-demo-*")) == []
