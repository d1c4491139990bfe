"""What `appliance parity` refuses before it starts an engine, and how it ends with what comes of one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.cli.main import run
from appliance.errors import EXIT_CONFIG, EXIT_HOST, EXIT_MISS, EXIT_RESOURCE, EXIT_TRUST

EQUAL: dict[str, Any] = {
    "model": "m",
    "stages": {"target 0": "loaded", "target 1": "loaded"},
    "tokens": 640,
    "same_tokens": True,
    "same_logprobs": True,
    "differing": [],
    "controls": 0,
    "repeated": 0,
    "agreed": 1,
}


def manifest(folder: Path, **settings: Any) -> str:
    model = {"checkpoint": str(folder), "engine": {"kind": "vllm", "port": 8001}, **settings}
    path = folder / "appliance.yaml"
    path.write_text(yaml.safe_dump({"models": {"m": model}}))
    return str(path)


def ended(monkeypatch: pytest.MonkeyPatch, status: int, printed: str) -> None:
    """Have the child that compares end like this: the real one is tested with a real vLLM."""

    def started(argv: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        assert argv[:3] == [sys.executable, "-m", "appliance.vllm.parity"]
        return subprocess.CompletedProcess(argv, status, printed)

    monkeypatch.setattr(subprocess, "run", started)


def test_the_built_in_engine_is_refused_at_once(tmp_path: Path) -> None:
    assert run(["parity", "m", "--manifest", manifest(tmp_path, engine={"port": 8001})]) == EXIT_CONFIG


def test_equal_weights_end_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(monkeypatch, 0, f"noise of vLLM\n{json.dumps(EQUAL)}\nmore of it\n")
    assert run(["parity", "m", "--manifest", manifest(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 shards, weights kept as loaded" in said
    assert "DIFFERENT" not in said
    assert run(["parity", "m", "--json", "--manifest", manifest(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == EQUAL


def test_a_tensor_that_differs_is_named_and_ends_with_77(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(monkeypatch, EXIT_TRUST, json.dumps(EQUAL | {"differing": ["target 1: model.norm.weight: other bytes"]}))
    assert run(["parity", "m", "--manifest", manifest(tmp_path)]) == EXIT_TRUST
    said = capsys.readouterr()
    assert "target 1: model.norm.weight: other bytes" in said.out
    assert "attached weights are not those on disk" in said.err


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ({"agreed": 0}, (EXIT_TRUST, "`appliance parity m --control 3` tells whether its own loading repeats")),
        ({"controls": 3, "repeated": 3, "agreed": 0}, (EXIT_TRUST, "its own loading repeats its own")),
        ({"controls": 3, "repeated": 1, "agreed": 0}, (0, "vLLM's own loading does not repeat its own answers here")),
    ],
)
def test_other_answers_of_equal_weights_are_told_with_whether_vllm_repeats_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tried: dict[str, int],
    expected: tuple[int, str],
) -> None:
    status, said = expected
    ended(monkeypatch, status, json.dumps(EQUAL | {"same_logprobs": False} | tried))
    assert run(["parity", "m", "--manifest", manifest(tmp_path)]) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert "attached weights are not those on disk" not in printed.err
    if "controls" in tried:
        assert f"vLLM from disk, 3 times more: {tried['repeated']} said the same" in printed.out
        assert "attached, 4 times: 0 said what it had said from disk" in printed.out


def test_the_child_is_told_how_often_to_serve_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def started(argv: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        told.extend(argv)
        return subprocess.CompletedProcess(argv, 0, json.dumps(EQUAL))

    monkeypatch.setattr(subprocess, "run", started)
    assert run(["parity", "m", "--control", "3", "--manifest", manifest(tmp_path)]) == 0
    assert told[told.index("--control") + 1] == "3"


@pytest.mark.parametrize(("status", "expected"), [(EXIT_MISS, EXIT_MISS), (1, EXIT_HOST), (-9, EXIT_RESOURCE)])
def test_a_comparison_that_did_not_happen_is_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, expected: int
) -> None:
    ended(monkeypatch, status, "")
    assert run(["parity", "m", "--manifest", manifest(tmp_path)]) == expected
