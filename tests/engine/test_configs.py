"""The configs of a checkpoint: whatever is wrong with one is a ConfigError that names it, and nothing else happens."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.engine.configs import (
    SamplingDefaults,
    load_config,
    load_sampling_defaults,
    read_object,
    stated_dtype,
)
from appliance.engine.model import skeleton
from appliance.errors import ConfigError

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISSING = object()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ":1:1: not JSON"),
        (b'{\n  "model_type": llama\n}', ":2:17: not JSON"),
        (b'{"model_type": "llama"', ": not JSON"),
        (b"\xff\xfe\x00{", "not JSON"),
        (b'{"model_type": "\xff"}', "not JSON: byte 16 is not UTF-8"),
        (b"\x00" * 100, ":1:1: not JSON"),
        (b"[" * 200_000, "not JSON that can be read"),
        (b'{"a": ' * 200_000, "not JSON that can be read"),
        (b"1" * 10_000, "not JSON that can be read"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "no model_type"),
        (b'{"model_type": 5}', "model_type 5 is unknown"),
        (b'{"model_type": ["llama"]}', "model_type ['llama'] is unknown"),
        (b'{"model_type": "llamaa"}', "model_type 'llamaa' is unknown to transformers"),
        (b" " * ((16 << 20) + 1), "larger than 16 MiB"),
    ],
    ids=range(16),
)
def test_a_config_that_cannot_be_read_is_refused_with_its_place(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path, dtype="auto")
    assert str(tmp_path / "config.json") in caught.value.message
    assert expected in caught.value.message


def test_a_missing_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        load_config(tmp_path, dtype="auto")


def test_code_that_comes_with_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(trap)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    map_ = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    config = configured(tmp_path, model_type="brand-new", auto_map=map_)
    with pytest.raises(ConfigError, match="such code is never run"):
        load_config(config, dtype="auto")
    # Where transformers has the architecture itself, its own code is what runs.
    assert type(skeleton(configured(tmp_path, auto_map=map_), dtype="auto")).__module__.startswith("transformers.")
    assert not trap.exists()


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_a_quantized_checkpoint_is_refused_with_a_way_out(tmp_path: Path, place: str) -> None:
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    if place == "text_config":
        text = {key: value for key, value in PLAIN.items() if key != "architectures"} | quantized
        config = configured(tmp_path, model_type="llava", text_config=text, vision_config={"model_type": "clip"})
    else:
        config = configured(tmp_path, **quantized)
    with pytest.raises(ConfigError, match="quantization_config") as caught:
        load_config(config, dtype="auto")
    assert "vllm" in (caught.value.hint or "")


def test_the_dtype_is_the_managers_word_before_the_checkpoints(tmp_path: Path) -> None:
    assert load_config(configured(tmp_path), dtype="auto").dtype is torch.bfloat16
    assert load_config(configured(tmp_path), dtype="float32").dtype is torch.float32
    assert load_config(configured(tmp_path, dtype=MISSING, torch_dtype="float16"), dtype="auto").dtype is torch.float16


@pytest.mark.parametrize("dtype", [MISSING, None])
def test_a_dtype_that_nobody_states_is_not_guessed(tmp_path: Path, dtype: object) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: dtype: missing") as caught:
        load_config(configured(tmp_path, dtype=dtype), dtype="auto")
    assert "manifest" in (caught.value.hint or "")


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", "float64", "nonsense", "nn", "__class__"])
def test_a_dtype_that_cannot_be_served_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        load_config(configured(tmp_path, dtype=dtype), dtype="auto")
    with pytest.raises(ConfigError, match=f"dtype '{dtype}' is unknown"):
        load_config(configured(tmp_path), dtype=dtype)


@pytest.mark.parametrize("seed", range(8))
def test_hostile_values_end_in_a_model_or_in_a_config_error(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(25):
        damaged = copy.deepcopy(PLAIN)
        for name in source.sample(sorted(damaged), source.randint(1, 3)):
            damaged[name] = source.choice(
                [-1, 0, 1.5, 10**30, None, "", "x", [], {}, True, ["a"], {"rope_type": "x"}, "a/b@c:d", float("nan")]
            )
        (tmp_path / "config.json").write_text(json.dumps(damaged))
        try:
            skeleton(tmp_path, dtype="auto")
        except ConfigError as error:
            assert str(tmp_path) in error.message


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_kernel_that_a_config_names_is_not_fetched(tmp_path: Path, key: str, offline: None) -> None:
    module: Any = skeleton(configured(tmp_path, **{key: "kernels-community/flash-attn"}), dtype="auto")
    assert module.config._attn_implementation == "sdpa"


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    configured(tmp_path)
    said = {"eos_token_id": [5, 6], "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said | {"num_beams": 4, "repetition_penalty": 1.1}))
    assert load_sampling_defaults(tmp_path) == SamplingDefaults((5, 6), 0, 0.6, 0.9, 20, 1.1)


def test_without_a_generation_config_the_ids_come_from_the_config(tmp_path: Path) -> None:
    configured(tmp_path, pad_token_id=3)
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(stop_ids=(2,), pad_id=3)
    configured(tmp_path, text_config={"eos_token_id": 9})
    assert load_sampling_defaults(tmp_path).stop_ids == (9,)
    configured(tmp_path, eos_token_id=None)
    assert load_sampling_defaults(tmp_path).stop_ids == ()


@pytest.mark.parametrize(
    "said",
    [
        {"eos_token_id": "</s>"},
        {"eos_token_id": -1},
        {"eos_token_id": [1, None, True]},
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 2},
        {"top_k": 1.5},
        {"top_k": True},
        {"repetition_penalty": 0},
        {"pad_token_id": 1 << 40},
    ],
)
def test_a_default_that_makes_no_sense_is_refused_by_name(tmp_path: Path, said: dict[str, object]) -> None:
    configured(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {next(iter(said))}"):
        load_sampling_defaults(tmp_path)


def test_reading_never_takes_more_than_the_limit(tmp_path: Path) -> None:
    huge = tmp_path / "config.json"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ConfigError, match="larger than"):
        read_object(huge)


def configured(directory: Path, **changes: object) -> Path:
    said = {name: value for name, value in (PLAIN | changes).items() if value is not MISSING}
    (directory / "config.json").write_text(json.dumps(said))
    return directory


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test if anything resolves a name or connects."""
    import socket

    def refuse(*args: object, **_: object) -> None:
        pytest.fail(f"the network was used: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield


@pytest.mark.parametrize(
    ("said", "asked", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": "float16"}, "auto", "float16"),
        ({"text_config": {"dtype": "float32"}}, "auto", "float32"),
        ({"dtype": "bfloat16"}, "float16", "float16"),
        ({"dtype": 7, "text_config": []}, "auto", ""),
    ],
)
def test_the_dtype_is_known_without_transformers(tmp_path: Path, said: object, asked: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert stated_dtype(tmp_path, dtype=asked) == expected
