"""What decides how vLLM lays out weights, and what does not."""

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.vllm.facts import facts

SETTINGS: dict[str, Any] = {"hidden_size": 64, "_name_or_path": "/a", "model": {"layers": 1, "_name_or_path": "/a"}}


def digest(settings: dict[str, Any]) -> object:
    hf_config = SimpleNamespace(model_type="eagle", to_dict=lambda: settings)
    model_config = SimpleNamespace(architectures=["EagleLlamaForCausalLM"], hf_config=hf_config, dtype="torch.bfloat16")
    return facts(SimpleNamespace(lora_config=None), model_config, device="cpu")["config.sha256"]


def test_the_same_config_in_another_folder_is_the_same() -> None:
    moved = {"hidden_size": 64, "_name_or_path": "/b", "model": {"layers": 1, "_name_or_path": "/c"}}
    assert digest(moved) == digest(SETTINGS)


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": 65},
        {"model": {"layers": 2, "_name_or_path": "/a"}},
        {"rope": None},
        {"model": {"layers": 1, "x": 0}},
    ],
)
def test_a_setting_that_differs_anywhere_makes_another_config(changed: dict[str, Any]) -> None:
    assert digest(SETTINGS | changed) != digest(SETTINGS)
