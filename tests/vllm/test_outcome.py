"""What workers tell the process that started them."""

import json
from pathlib import Path

import pytest

from appliance.client import RefusedError
from appliance.errors import EXIT_MISS, EXIT_TRUST, HostError, MissError, TrustError
from appliance.verdict import Reason, refused
from appliance.vllm.outcome import Outcome, failure, read_all, write


def test_outcomes_come_back_by_role_and_rank(tmp_path: Path) -> None:
    for rank in (1, 0, 10, 2):
        write(str(tmp_path), Outcome("target", rank, verdict="hit", phases_s={"attach": 0.5}))
    write(str(tmp_path), Outcome("draft", 0, verdict="donated"))
    found = read_all(tmp_path)
    assert [(outcome.role, outcome.rank) for outcome in found] == [
        ("draft", 0),
        ("target", 0),
        ("target", 1),
        ("target", 2),
        ("target", 10),
    ]
    assert found[1] == Outcome("target", 0, verdict="hit", phases_s={"attach": 0.5})


def test_where_nobody_named_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(None, Outcome("target", 0))
    assert not list(tmp_path.iterdir())


def test_one_that_is_half_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "target-0.partial").write_text('{"role": "tar')
    assert read_all(tmp_path) == []


def test_a_failure_keeps_the_status_of_its_error_and_the_keepers_reason() -> None:
    error = MissError("no weights to attach")
    error.__cause__ = RefusedError(refused(Reason.NOT_RESIDENT, "slot target-0 is empty"))
    failed = Outcome("target", 0).failed(error)
    assert (failed.verdict, failed.reason, failed.exit_status) == ("refused", "not_resident", EXIT_MISS)
    plain = Outcome("target", 0).failed(TrustError("m.safetensors differs", hint="sign it"))
    assert (plain.reason, plain.exit_status) == ("", EXIT_TRUST)
    assert "m.safetensors differs" in plain.error


@pytest.mark.parametrize(("reason", "expected"), [("not_resident", Reason.NOT_RESIDENT), ("", None), ("made up", None)])
def test_the_first_failure_is_an_error_again_with_the_keepers_reason(
    tmp_path: Path, reason: str, expected: Reason | None
) -> None:
    assert failure(tmp_path) is None
    write(str(tmp_path), Outcome("target", 0, verdict="hit"))
    write(str(tmp_path), Outcome("target", 2, error="the third", exit_status=EXIT_TRUST))
    write(str(tmp_path), Outcome("target", 1, error="no weights", exit_status=EXIT_MISS, reason=reason))
    error = failure(tmp_path)
    assert isinstance(error, MissError)
    assert "no weights" in str(error)
    cause = error.__cause__
    assert (cause.verdict.reason if isinstance(cause, RefusedError) else None) == expected


def test_one_that_failed_before_it_knew_its_rank_is_told_too(tmp_path: Path) -> None:
    write(str(tmp_path), Outcome("", -1).failed(TrustError("no")))
    assert [path.name for path in tmp_path.iterdir()] == ["none--1.json"]
    assert read_all(tmp_path)[0].exit_status == EXIT_TRUST


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"role": 1}', json.dumps({"role": "t", "who": 0})])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "target-0.json").write_text(text)
    with pytest.raises(HostError, match=r"target-0\.json: not an outcome"):
        read_all(tmp_path)


def test_a_folder_that_is_gone_is_an_error_of_the_host(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot write"):
        write(str(tmp_path / "gone"), Outcome("target", 0))
