"""Which variables of the environment, and which arguments of vLLM, are facts about the weights."""

import pytest

from appliance.manifest.shaping import NAMES_VARIABLE, NEUTRAL_VARIABLES, shaping_arguments, shaping_variables


def test_a_variable_of_vllm_that_nobody_knows_is_a_fact() -> None:
    assert shaping_variables({"VLLM_SOMETHING_NEW": "1", "HOME": "/root"}) == ["VLLM_SOMETHING_NEW"]


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_LOGGING_LEVEL", "VLLM_PORT"])
def test_one_that_chooses_no_kernel_is_none(name: str) -> None:
    assert name in NEUTRAL_VARIABLES
    assert shaping_variables({name: "x"}) == []


@pytest.mark.parametrize("name", ["VLLM_USE_DEEP_GEMM", "VLLM_ATTENTION_BACKEND", "VLLM_CPU_SGL_KERNEL"])
def test_one_that_chooses_a_kernel_is_not_neutral(name: str) -> None:
    assert shaping_variables({name: "1"}) == [name]


def test_names_are_taken_from_who_started_vllm_where_it_said_them() -> None:
    environ = {NAMES_VARIABLE: "VLLM_A VLLM_B", "VLLM_C": "set by vLLM itself"}
    assert shaping_variables(environ) == ["VLLM_A", "VLLM_B"]
    assert shaping_variables({NAMES_VARIABLE: "", "VLLM_C": "1"}) == []


def test_names_are_sorted() -> None:
    assert shaping_variables({"VLLM_Z": "", "VLLM_A": ""}) == ["VLLM_A", "VLLM_Z"]


def test_an_argument_that_nobody_knows_is_a_fact_with_its_values() -> None:
    words = ["--max-num-seqs", "8", "--max-model-len", "256", "--new-thing", "a", "b", "--seed=1", "-O3", "--flag"]
    assert shaping_arguments(words) == ["--max-model-len", "256", "--new-thing", "a", "b", "-O3", "--flag"]


def test_a_key_is_never_a_fact() -> None:
    assert shaping_arguments(["--api-key", "secret", "--api_key=secret"]) == []


def test_which_adapters_there_are_at_first_is_no_fact_and_that_there_may_be_some_is() -> None:
    words = ["--enable-lora", "--lora-modules", "a=/srv/a", "b=/srv/b", "--max-lora-rank", "8"]
    assert shaping_arguments(words) == ["--enable-lora", "--max-lora-rank", "8"]
    assert shaping_variables({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) == []


def test_a_negative_number_is_a_value() -> None:
    assert shaping_arguments(["--seed", "-1", "--max-model-len", "-1"]) == ["--max-model-len", "-1"]
