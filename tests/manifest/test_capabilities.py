"""The table of what engine kinds can do is about settings that there are."""

from typing import get_args

import pytest

from appliance.manifest.capabilities import BACKENDS, capability_findings
from appliance.manifest.inventory import every_setting
from appliance.manifest.schema import Engine, Model, Parallel

PATH = ("models", "chat")


def test_the_table_has_every_engine_kind_of_the_schema() -> None:
    assert set(BACKENDS) == set(get_args(Engine.model_fields["kind"].annotation))


def test_the_table_speaks_of_settings_that_there_are() -> None:
    known = every_setting()
    for backend in BACKENDS.values():
        assert backend.axes <= set(Parallel.model_fields)
        for setting in (*backend.settings, *(backend.own_args or {}).values()):
            assert ("models", "*", *setting.split(".")) in known


def test_whatever_a_kind_cannot_do_another_can() -> None:
    for model in (_model(parallel={axis: 2}) for axis in Parallel.model_fields):
        assert [finding.hint for finding in capability_findings(PATH, model)] == ["engine.kind: vllm can"]


@pytest.mark.parametrize(
    "settings",
    [{"quantization": "fp8"}, {"draft": {"method": "mtp"}}, {"args": ["--fast"]}],
    ids=lambda settings: next(iter(settings)),
)
def test_an_optional_setting_is_refused_by_the_kind_that_would_ignore_it(settings: dict[str, object]) -> None:
    refused = list(capability_findings(PATH, _model(**settings)))
    assert [finding.hint for finding in refused] == ["engine.kind: vllm can"]
    assert refused[0].is_error
    taken = list(capability_findings(PATH, _model("vllm", **settings)))
    assert [finding.path for finding in taken if finding.is_error] == []


def test_a_model_that_asks_for_nothing_special_is_served_by_the_built_in_engine() -> None:
    assert list(capability_findings(PATH, _model())) == []
    assert list(capability_findings(PATH, _model(gpus=[0]))) == []


def _model(kind: object = "builtin", *, args: object = (), **settings: object) -> Model:
    engine = {"kind": kind, "port": 8001, "args": args}
    return Model.model_validate({"checkpoint": "/srv/chat", "engine": engine, **settings})
