"""A Manifest in code: frozen, and strict about what YAML and people let through."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from appliance.errors import ConfigError
from appliance.manifest.schema import Engine, Manifest, Model, Parallel

CHAT = Model(checkpoint=Path("/srv/chat"), engine=Engine(port=8001))


def test_a_model_needs_a_checkpoint_and_a_port_and_nothing_else() -> None:
    assert (CHAT.dtype, CHAT.mode, CHAT.on_miss, CHAT.verify, CHAT.wait_s) == ("auto", "zero_copy", "fail", "stat", 600)
    assert (CHAT.revision, CHAT.quantization, CHAT.draft, CHAT.gpus) == (None, None, None, ())
    assert (CHAT.engine.kind, CHAT.engine.runtime, CHAT.engine.host) == ("builtin", "native", "127.0.0.1")
    assert (CHAT.engine.args, CHAT.engine.environment, CHAT.engine.threads, CHAT.engine.cpus) == ((), {}, None, ())
    assert (CHAT.health.host, CHAT.health.port) == ("127.0.0.1", None)
    assert CHAT.parallel.world_size == 1


def test_a_manifest_trusts_signed_checkpoints_alone_unless_it_says_otherwise() -> None:
    manifest = Manifest(models={"chat": CHAT})
    assert (manifest.trust.policy, manifest.trust.keys) == ("signed", (Path("/etc/appliance/trust"),))
    assert manifest.group == "appliance"
    assert manifest.socket_path("chat") == Path("/run/appliance/chat/keeper.sock")


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        CHAT.engine.port = 1


def test_a_model_that_is_not_in_the_manifest_is_a_config_error_that_names_those_that_are() -> None:
    manifest = Manifest(models={"chat": CHAT, "other": CHAT})
    assert manifest.model("chat") is manifest.models["chat"]
    with pytest.raises(ConfigError, match="no model 'chatt'") as caught:
        manifest.model("chatt")
    assert caught.value.hint == "its models: chat, other"
    with pytest.raises(ConfigError) as caught:
        Manifest(models={}).model("chat")
    assert caught.value.hint == "its models: none"


def test_ranks_are_tensor_times_pipeline_times_data() -> None:
    assert Parallel(tensor=2, pipeline=3, data=5, expert=10).world_size == 30


def test_a_relative_path_without_a_manifest_file_is_refused() -> None:
    with pytest.raises(ValidationError, match="relative"):
        Model.model_validate({"checkpoint": "chat", "engine": {"port": 8001}})


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"gpus": ["gpu-0A1B2C3D-0000-1111-2222-333344445555"]}, ("GPU-0a1b2c3d-0000-1111-2222-333344445555",)),
        ({"gpus": [3, "MIG-0a1b2c3d-0000-1111-2222-333344445555"]}, (3, "MIG-0a1b2c3d-0000-1111-2222-333344445555")),
    ],
)
def test_gpus_are_indexes_and_uuids_in_one_spelling(settings: dict[str, object], what: object) -> None:
    assert Model.model_validate({"checkpoint": "/x", "engine": {"port": 1}, **settings}).gpus == what


@pytest.mark.parametrize(
    ("cpus", "numbers"),
    [("0-3", (0, 1, 2, 3)), ("8, 0-1", (0, 1, 8)), (5, (5,)), ([0, "2-3", 2], (0, 2, 3)), ("8191", (8191,)), ([], ())],
)
def test_cpus_are_a_sorted_list_of_numbers(cpus: object, numbers: tuple[int, ...]) -> None:
    assert Engine.model_validate({"port": 1, "cpus": cpus}).cpus == numbers


@pytest.mark.parametrize(
    ("host", "stored"),
    [
        ("LOCALHOST", "localhost"),
        ("::FFFF:10.0.0.1", "10.0.0.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("0.0.0.0", "0.0.0.0"),
    ],
)
def test_one_host_has_one_spelling(host: str, stored: str) -> None:
    assert Engine(port=1, host=host).host == stored


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8001"),
        ("0.0.0.0", "http://127.0.0.1:8001"),
        ("::", "http://[::1]:8001"),
        ("::1", "http://[::1]:8001"),
        ("engine.internal", "http://engine.internal:8001"),
    ],
)
def test_an_engine_is_asked_where_it_listens(host: str, url: str) -> None:
    assert Engine(host=host, port=8001).base_url == url
