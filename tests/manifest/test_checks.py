"""What settings may not say together; what needs a file around it is among the cases."""

import os
from pathlib import Path
from typing import Any

import pytest

from appliance.manifest.checks import MAX_SOCKET_PATH_BYTES, findings
from appliance.manifest.finding import Finding
from appliance.manifest.schema import Manifest

UUID = "GPU-0a1b2c3d-0000-1111-2222-333344445555"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("127.0.0.1", "::"),
        ("127.0.0.1", "localhost"),
        ("::1", "::"),
        ("::1", "localhost"),
        ("0.0.0.0", "::"),
        ("0.0.0.0", "localhost"),
        ("::", "localhost"),
        ("gpu7", "gpu7"),
        ("gpu7", "0.0.0.0"),
        ("gpu7", "::"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_listeners_in_each_others_way_are_found_in_any_order(first: str, second: str) -> None:
    for one, other in ((first, second), (second, first)):
        found = _errors(a={"engine": {"port": 8001, "host": one}}, b={"engine": {"port": 8001, "host": other}})
        assert [finding.path for finding in found] == [("models", "b", "engine", "port")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("127.0.0.1", "127.0.0.2"),
        ("127.0.0.1", "::1"),
        ("0.0.0.0", "::1"),
        ("10.0.0.1", "localhost"),
        ("gpu7", "gpu8"),
        ("gpu7", "10.0.0.7"),
        ("gpu7", "localhost"),
    ],
)
def test_listeners_that_leave_each_other_alone_may_share_a_port(first: str, second: str) -> None:
    for one, other in ((first, second), (second, first)):
        assert not _errors(a={"engine": {"port": 8001, "host": one}}, b={"engine": {"port": 8001, "host": other}})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_loopback_address_warns_of_nothing(host: str) -> None:
    assert _found(a={"engine": {"port": 8001, "host": host}, "health": {"port": 9001, "host": host}}) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu7", "localhost.example.org"])
def test_any_other_address_warns_of_the_network(host: str) -> None:
    found = _found(a={"engine": {"port": 8001, "host": host}})
    assert [(finding.path[2:], finding.is_error) for finding in found] == [(("engine", "host"), False)]


def test_an_address_without_a_port_warns_of_nothing() -> None:
    assert _found(a={"health": {"host": "0.0.0.0"}}) == []


def test_a_port_is_reported_for_each_that_comes_too_late() -> None:
    found = _errors(**{name: {"engine": {"port": 8001}} for name in "abcd"})
    assert [finding.path[1] for finding in found] == ["b", "c", "d"]


def test_a_socket_path_of_just_the_size_that_fits_is_right() -> None:
    name = "a" * 64
    fitting = "/" + "r" * (MAX_SOCKET_PATH_BYTES - len(f"//{name}/keeper.sock"))
    assert len(f"{fitting}/{name}/keeper.sock") == MAX_SOCKET_PATH_BYTES
    assert not _errors({"directories": {"runtime": fitting}}, **{name: {}})
    (finding,) = _errors({"directories": {"runtime": fitting + "r"}}, **{name: {}})
    assert "108 bytes" in finding.message
    # An umlaut has two bytes.
    assert _errors({"directories": {"runtime": fitting[:-1] + "\u00fc"}}, **{name: {}})


def test_a_folder_whose_name_is_no_text_is_measured_too() -> None:
    runtime = Path(os.fsdecode(b"/run/\xff"))
    manifest = Manifest.model_validate({"models": {"a": _model("a", {})}, "directories": {"runtime": runtime}})
    assert list(findings(manifest)) == []


def test_as_many_threads_as_cpus_are_right_and_more_are_a_warning() -> None:
    assert _found(a={"engine": {"port": 8001, "threads": 4, "cpus": "0-3"}}) == []
    assert _found(a={"engine": {"port": 8001, "threads": 4}}) == []
    (finding,) = _found(a={"engine": {"port": 8001, "threads": 5, "cpus": "0-3"}})
    assert not finding.is_error


@pytest.mark.parametrize(
    "name", ["NOTIFY_SOCKET", "LISTEN_FDS", "WATCHDOG_USEC", "FDSTORE", "APPLIANCE_X", "CUDA_VISIBLE_DEVICES"]
)
def test_what_the_appliance_sets_is_not_for_the_environment(name: str) -> None:
    (finding,) = _errors(a={"engine": {"port": 8001, "environment": {name: "x"}}})
    assert finding.path == ("models", "a", "engine", "environment", name)


def test_a_number_of_threads_in_the_environment_is_right_if_it_is_the_only_one() -> None:
    environment = {"OMP_NUM_THREADS": "4"}
    assert _found(a={"engine": {"port": 8001, "environment": environment}}) == []
    assert _errors(a={"engine": {"port": 8001, "environment": environment, "threads": 4}})


@pytest.mark.parametrize("name", ["MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"])
def test_another_number_of_threads_for_one_library_is_told_of(name: str) -> None:
    (finding,) = _found(a={"engine": {"port": 8001, "environment": {name: "1"}, "threads": 4}})
    assert finding.path == ("models", "a", "engine", "environment", name)
    assert (finding.is_error, finding.reads) == (False, (("models", "a", "engine", "threads"),))
    assert _found(a={"engine": {"port": 8001, "environment": {name: "1"}}}) == []


def test_gpus_by_index_and_by_uuid_warn_once_over_all_models() -> None:
    found = _found(
        **{
            name: {"gpus": [gpu], "engine": {"port": 8001 + port, "kind": "vllm"}}
            for port, (name, gpu) in enumerate([("a", 0), ("b", UUID), ("c", 1)])
        }
    )
    assert [finding.path for finding in found if finding.path[-1] == "gpus"] == [("models", "a", "gpus")]


def _errors(settings: Any = None, /, **models: Any) -> list[Finding]:
    return [finding for finding in _found(settings, **models) if finding.is_error]


def _found(settings: Any = None, /, **models: Any) -> list[Finding]:
    data = {"models": {name: _model(name, model) for name, model in models.items()}, **(settings or {})}
    return list(findings(Manifest.model_validate(data)))


def _model(name: str, settings: dict[str, object]) -> dict[str, object]:
    return {"checkpoint": f"/srv/{name}", "engine": {"port": 8001}, **settings}
