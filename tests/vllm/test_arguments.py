"""What `vllm serve` is told for a model of the manifest."""

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.manifest.schema import Model
from appliance.vllm.arguments import serve_arguments

CONFIGS = Path("/state/configs/aa")


def model(engine: dict[str, Any] | None = None, **settings: Any) -> Model:
    told = {"kind": "vllm", "port": 8001, **(engine or {})}
    return Model.model_validate({"checkpoint": "/srv/m", "engine": told, **settings})


def value_of(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_a_plain_model_is_served_by_name_from_its_configs() -> None:
    arguments = serve_arguments("support-bot", model(), configs=CONFIGS)
    assert arguments[0] == "/state/configs/aa"
    assert value_of(arguments, "--served-model-name") == "support-bot"
    assert (value_of(arguments, "--host"), value_of(arguments, "--port")) == ("127.0.0.1", "8001")
    assert (value_of(arguments, "--load-format"), value_of(arguments, "--dtype")) == ("appliance", "auto")
    assert not [word for word in arguments if "parallel" in word or "quantization" in word or "speculative" in word]


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"tensor": 2}, ["--tensor-parallel-size", "2"]),
        ({"pipeline": 3}, ["--pipeline-parallel-size", "3"]),
        ({"data": 2}, ["--data-parallel-size", "2"]),
        (
            {"tensor": 2, "data": 2, "expert": 4},
            ["--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-expert-parallel"],
        ),
    ],
)
def test_ranks_are_passed_on(parallel: dict[str, int], expected: list[str]) -> None:
    arguments = serve_arguments("m", model(parallel=parallel), configs=CONFIGS)
    assert [word for word in arguments[arguments.index("auto") + 1 :] if word] == expected


def test_a_quantization_is_named_only_where_the_manifest_names_one() -> None:
    arguments = serve_arguments("m", model(quantization="fp8"), configs=CONFIGS)
    assert value_of(arguments, "--quantization") == "fp8"


def test_arguments_of_the_manifest_come_last_so_that_they_win() -> None:
    arguments = serve_arguments("m", model({"args": ["--max-model-len", "256"]}), configs=CONFIGS)
    assert arguments[-2:] == ["--max-model-len", "256"]


def test_a_draft_model_is_the_folder_of_its_configs() -> None:
    draft = {"method": "eagle3", "tokens": 3, "checkpoint": "/srv/draft"}
    arguments = serve_arguments("m", model(draft=draft), configs=CONFIGS, draft_configs=Path("/state/configs/bb"))
    told = json.loads(value_of(arguments, "--speculative-config"))
    assert told == {"method": "eagle3", "num_speculative_tokens": 3, "model": "/state/configs/bb"}


def test_a_draft_in_the_models_own_checkpoint_has_no_folder() -> None:
    arguments = serve_arguments("m", model(draft={"method": "mtp", "tokens": 1}), configs=CONFIGS)
    assert json.loads(value_of(arguments, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 1}
