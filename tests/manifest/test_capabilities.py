"""The table of what engine kinds can do is about settings that there are."""

from typing import get_args

import pytest

from appliance.manifest.capabilities import BACKENDS, MODEL_NAME, capability_findings
from appliance.manifest.inventory import every_setting
from appliance.manifest.schema import Engine, Model, Parallel

PATH = ("models", "chat")


def test_the_table_has_every_engine_kind_of_the_schema() -> None:
    assert set(BACKENDS) == set(get_args(Engine.model_fields["kind"].annotation))


def test_the_table_speaks_of_settings_that_there_are() -> None:
    known = every_setting()
    for backend in BACKENDS.values():
        assert backend.axes <= set(Parallel.model_fields)
        for setting in {*backend.settings, *backend.own_args.values()} - {MODEL_NAME}:
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


@pytest.mark.parametrize(
    ("argument", "setting"),
    [
        ("--load-format", "engine.kind"),
        ("--load-form=auto", "engine.kind"),
        ("--load_format", "engine.kind"),
        ("--tensor-parallel", "parallel.tensor"),
        ("--tensor_par=4", "parallel.tensor"),
        ("--no-enable-exp", "parallel.expert"),
        ("--served-model-name", MODEL_NAME),
        ("--served_model=other", MODEL_NAME),
        ("--speculative-config.method", "draft"),
        ("--speculative_config.num_speculative_tokens=3", "draft"),
        ("--speculative.method", "draft"),
        ("--spec-tokens", "draft"),
        ("-sc", "draft"),
        ("-sc.method", "draft"),
        ("-s", "draft"),
        ("-t", "parallel.tensor"),
        ("-tp=4", "parallel.tensor"),
        ("-qfp8", "quantization"),
    ],
)
def test_an_argument_that_the_engine_takes_for_one_of_ours_is_refused(argument: str, setting: str) -> None:
    (finding,) = capability_findings(PATH, _model("vllm", args=[argument]))
    assert (finding.path, finding.hint) == ((*PATH, "engine", "args", 0), f"use {setting}")


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ("--ssl-keyfile", "--ssl-keyfile"),
        ("--ssl_cert-reqs=1", "--ssl-cert-reqs"),
        ("--ssl-ci", "--ssl-ciphers"),
        ("--ud=/s", "--uds"),
        ("--headl", "--headless"),
        ("--conf", "--config"),
    ],
)
def test_an_argument_that_would_hide_the_engine_is_refused(argument: str, option: str) -> None:
    (finding,) = capability_findings(PATH, _model("vllm", args=[argument]))
    assert finding.path == (*PATH, "engine", "args", 0)
    assert finding.hint == BACKENDS["vllm"].no_args[option][1]


@pytest.mark.parametrize(
    "argument",
    [
        *("--config-format", "--grpc-port", "--enable-ssl-refresh", "--root-path"),
        *("--", "-", "", "--max-model-len", "--max_model_len=32768", "--model-impl", "--data-parallel-size-local"),
        *("--quantization-config", "--tensor-parallel-size-of-another", "--tokenizer.mode", "--reasoning-parser"),
        *("load-format", "0.90", "-0.5", "-1", "-O3", "-cc", "-dcp", "-n", "-r", '{"--dtype": "auto"}'),
    ],
)
def test_an_argument_that_is_none_of_ours_is_passed_on(argument: str) -> None:
    assert list(capability_findings(PATH, _model("vllm", args=[argument]))) == []


def test_a_beginning_is_reported_with_what_it_stands_for() -> None:
    (finding,) = capability_findings(PATH, _model("vllm", args=["--load-form=auto"]))
    assert finding.message == "--load-form (--load-format) is set by the manifest's engine.kind"


def _model(kind: object = "builtin", *, args: object = (), **settings: object) -> Model:
    engine = {"kind": kind, "port": 8001, "args": args}
    return Model.model_validate({"checkpoint": "/srv/chat", "engine": engine, **settings})
