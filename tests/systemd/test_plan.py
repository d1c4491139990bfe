from pathlib import Path
from typing import Any

import pytest

from appliance.host.apply import write_files
from appliance.host.plan import Change, Plan, make_plan
from tests.systemd.manifests import files_of, model


def plan_of(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> Plan:
    """Return the plan that leads from one manifest to another, with the first one's files in a root of its own."""
    root = folder / "root"
    root.mkdir()
    write_files([Change(path, None, content) for path, content in files_of(folder, before).items()], root)
    return make_plan(files_of(folder, after), root)


def test_a_host_that_is_as_the_manifest_says_has_nothing_to_do(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"m": model()}, {"m": model()})
    assert not plan and plan.changes == () and plan.actions == ()


def test_a_new_model_is_started_weights_first(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"m": model()}, {"m": model(), "n": model(8002)})
    assert [str(action) for action in plan.actions] == [
        "start weights@n.service: new in the manifest",
        "start engine@n.service: new in the manifest",
        "start checkpoint@n.path: new in the manifest",
        "start checkpoint@n.timer: new in the manifest",
    ]


def test_a_removed_model_is_stopped_watchers_and_engine_first(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"m": model(), "n": model(8002)}, {"m": model()})
    units = [action.unit for action in plan.actions]
    assert units == ["checkpoint@n.path", "checkpoint@n.timer", "engine@n.service", "weights@n.service"]
    assert {str(action.verb) for action in plan.actions} == {"stop"}


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ({"engine": {"port": 9009}}, ["engine@m.service"]),
        ({"engine": {"port": 8001, "environment": {"A": "b"}}}, ["engine@m.service"]),
        ({"on_miss": "load"}, ["engine@m.service"]),
        ({"health": {"port": 9001}}, ["weights@m.service"]),
        ({"engine": {"port": 8001, "kind": "vllm"}}, ["weights@m.service", "engine@m.service"]),
        ({"dtype": "bfloat16"}, ["weights@m.service", "engine@m.service"]),
        ({"checkpoint": "/srv/other"}, ["weights@m.service", "engine@m.service", "checkpoint@m.path"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_setting_restarts_what_reads_it(tmp_path: Path, change: dict[str, Any], restarted: list[str]) -> None:
    plan = plan_of(tmp_path, {"m": model(), "n": model(8002)}, {"m": model() | change, "n": model(8002)})
    assert [action.unit for action in plan.actions] == restarted
    assert {str(action.verb) for action in plan.actions} == {"restart"}


def test_the_reason_names_the_setting_and_both_values(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"m": model()}, {"m": model(engine={"port": 9009})})
    assert [action.reason for action in plan.actions] == ["engine.port: 8001 -> 9009"]
    diffs = [change.diff() for change in plan.changes]
    assert any("-engine.port=8001" in diff and "+engine.port=9009" in diff for diff in diffs)


def test_files_of_others_are_not_ours_to_remove(tmp_path: Path) -> None:
    root = tmp_path / "root"
    theirs = root / "etc/systemd/system/engine@m.service.d/50-theirs.conf"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("[Service]\nNice=5\n")
    assert not make_plan({}, root)
