"""What vLLM's kernels note beside quantized weights reaches other processes, which need not process them again."""

import json
from typing import Any

import pytest

from tests.vllm import vllm_process

# Which dimension of a weight is which, and where vLLM says so since 0.33.
DIMENSIONS = ["0.weight", "input_dim", 0]
DIMENSIONS_OF_0_33 = ["0", "processed_weight_dims", [0, 1]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("kernels"))
    return json.loads(vllm_process.run("-m", "tests.vllm.mixtures", folder, timeout_s=200).splitlines()[-1])


@pytest.mark.parametrize(
    ("kernel", "flag"),
    [
        ("one scale a tensor", ["0.quant_method.fp8_linear", "logical_output_size", 384]),
        ("blocks", ["0", "deep_gemm_warmup_provider", "as 0.quant_method.fp8_linear"]),
        ("compressed-tensors", ["0.scheme.fp8_linear", "logical_output_size", 384]),
        ("compressed-tensors", DIMENSIONS),
        ("blocks, two kernels", ["0", "deep_gemm_warmup_provider", "as 0.quant_method.fp8_linear.fallback"]),
    ],
)
def test_a_layer_in_fp8_is_the_same_in_another_process(said: Any, kernel: str, flag: list[Any]) -> None:
    assert said[kernel]["left"] == []
    if flag == DIMENSIONS and DIMENSIONS not in said[kernel]["flags"]:
        flag = DIMENSIONS_OF_0_33
    assert flag in said[kernel]["flags"]
    left = said[kernel]["left by vLLM alone"]
    assert any(line.startswith((f"{flag[0]}:", f"{flag[0]}.{flag[1]}:")) for line in left), (
        "or there was nothing to bring along"
    )


@pytest.mark.parametrize(
    "method",
    [
        *("fp8", "fp8-block", "awq", "gptq", "compressed-tensors-fp8", "compressed-tensors-int8"),
        *("compressed-tensors-int4", "compressed-tensors-nvfp4", "modelopt-fp8", "modelopt-nvfp4", "mxfp4", "gpt-oss"),
    ],
)
def test_quantized_experts_are_the_same_in_another_process(said: Any, method: str) -> None:
    experts = said[f"experts, {method}"]
    assert experts["left"] == []
    scales = [f"quant_method.moe_quant_config._w{number}.scale" for number in (1, 2)]
    assert all(any(place.endswith(scale) for place in experts["rebuilt"]) for scale in scales), "or nothing was rebuilt"
