import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError
from appliance.manifest.schema import Manifest
from appliance.up.environment import unit_environment
from appliance.up.units import checkpoints, units

PATH = Path("/etc/appliance/appliance.yaml")


def manifest(**settings: Any) -> Manifest:
    chat = {"checkpoint": "/srv/chat", "engine": {"port": 8001, "threads": 4, "cpus": "2,0-1"}, "wait": 60}
    base = {"models": {"chat": chat, "draft.2": {"checkpoint": "/srv/draft", "engine": {"port": 8002}}}}
    return Manifest.model_validate({**base, **settings})


def test_each_model_has_a_keeper_and_an_engine_that_needs_it() -> None:
    assert [(unit.name, unit.needs) for unit in units(manifest(), PATH)] == [
        ("weights@chat", ()),
        ("weights@draft.2", ()),
        ("engine@chat", ("weights@chat",)),
        ("engine@draft.2", ("weights@draft.2",)),
    ]


def test_each_runs_this_pythons_module_with_the_manifests_own_path() -> None:
    weights, _, engine, _ = units(manifest(), Path("appliance.yaml"))
    arguments = ("--manifest", str(Path.cwd() / "appliance.yaml"), "--model", "chat")
    assert weights.argv == (sys.executable, "-m", "appliance.keeper", *arguments)
    assert engine.argv == (sys.executable, "-m", "appliance.engine", *arguments)


def test_only_the_keeper_has_a_store_and_a_watchdog() -> None:
    weights, _, engine, _ = units(manifest(), PATH)
    assert weights.store_limit > 1000 and weights.watchdog_s is not None
    assert engine.store_limit == 0 and engine.watchdog_s is None


def test_an_engine_has_the_manifests_threads_cpus_and_variables() -> None:
    engine = {"port": 8001, "threads": 4, "cpus": "2,0-1", "environment": {"A": "1", "OMP_NUM_THREADS": "9"}}
    models = {"chat": {"checkpoint": "/srv/chat", "engine": engine}}
    unit = units(manifest(models=models), PATH)[1]
    assert sorted(unit.cpus) == [0, 1, 2]
    assert (unit.environment["MKL_NUM_THREADS"], unit.environment["A"]) == ("4", "1")
    assert unit.environment["OMP_NUM_THREADS"] == "9"  # what the operator spells out wins


def test_without_a_number_of_threads_the_engine_decides() -> None:
    assert not any("THREADS" in name for name in units(manifest(), PATH)[3].environment)


def test_an_engine_may_wait_for_its_weights_before_its_own_time_to_start_begins() -> None:
    _, _, engine, other = units(manifest(), PATH)
    assert engine.start_timeout_s - 60 == other.start_timeout_s - 600 > 300


def test_a_container_is_refused_with_a_way_out() -> None:
    models = {"chat": {"checkpoint": "/srv/chat", "engine": {"port": 8001, "runtime": "podman"}}}
    with pytest.raises(ConfigError, match=r"models\.chat\.engine\.runtime") as caught:
        units(manifest(models=models), PATH)
    assert caught.value.hint is not None


def test_signed_checkpoints_are_watched_and_restart_keeper_then_engine() -> None:
    chat, _ = checkpoints(manifest(), PATH)
    assert (chat.model, chat.directories, chat.restart) == (
        "chat",
        (Path("/srv/chat"),),
        ("weights@chat", "engine@chat"),
    )
    assert chat.verify[-1] == "--verify" and str(PATH) in chat.verify


def test_a_drafts_own_checkpoint_is_watched_with_the_models() -> None:
    chat = {"checkpoint": "/srv/chat", "draft": {"checkpoint": "/srv/draft"}, "engine": {"port": 8001}}
    [found] = checkpoints(manifest(models={"chat": chat}), PATH)
    assert found.directories == (Path("/srv/chat"), Path("/srv/draft"))


def test_checkpoints_without_signatures_are_not_watched() -> None:
    assert checkpoints(manifest(trust={"policy": "local"}), PATH) == ()


def test_what_a_manager_above_us_said_is_not_passed_on() -> None:
    unit = units(manifest(), PATH)[2]
    given = {"PATH": "/bin", "LISTEN_FDS": "3", "NOTIFY_SOCKET": "/run/other", "FDSTORE": "9", "JOURNAL_STREAM": "1:2"}
    environment = unit_environment(unit, given, notify_path=Path("/run/own"), mark="/run/.up/engine@chat")
    assert environment == {
        **unit.environment,
        "PATH": "/bin",
        "NOTIFY_SOCKET": "/run/own",
        "APPLIANCE_UNIT": "/run/.up/engine@chat",
    }
