"""The same model both ways, from tensors in memory and as a skeleton with a shard attached, or a clear refusal."""

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from appliance.engine.model import load, skeleton
from appliance.errors import ConfigError
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.attachment import attach
from appliance.tensors.comparison import differences
from appliance.tensors.packing import pack
from tests.engine.checkpoints import ARCHITECTURES, make_checkpoint, quiet, read_tensors

PROMPT = torch.arange(3, 19)[None]
Description = dict[str, tuple[tuple[int, ...], torch.dtype, bool]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def each_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(directory, architecture=request.param, dtype=torch.bfloat16)


def test_it_is_what_transformers_loads_from_the_files(each_checkpoint: Path) -> None:
    with quiet():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(each_checkpoint, dtype=torch.bfloat16)
    ours = load(each_checkpoint, read_tensors(each_checkpoint), dtype="auto")
    assert type(ours) is type(theirs)
    assert tensors_of(ours).keys() == tensors_of(theirs).keys()
    for name, tensor in tensors_of(theirs).items():
        assert torch.equal(tensors_of(ours)[name], tensor), name
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_a_skeleton_has_the_same_names_shapes_dtypes_and_ties_and_no_memory(each_checkpoint: Path, dtype: str) -> None:
    loaded = load(each_checkpoint, read_tensors(each_checkpoint), dtype=dtype)
    bare = skeleton(each_checkpoint, dtype=dtype)
    assert type(bare) is type(loaded)
    assert described(bare) == described(loaded)
    assert ties(bare) == ties(loaded)
    assert all(tensor.is_meta for tensor in tensors_of(bare).values())
    assert not any(tensor.is_meta for tensor in tensors_of(loaded).values())
    assert not loaded.training
    assert not bare.training


def test_a_skeleton_with_a_shard_attached_says_the_same_to_the_last_bit(each_checkpoint: Path) -> None:
    loaded = load(each_checkpoint, read_tensors(each_checkpoint), dtype="auto")
    again, expected = load(each_checkpoint, read_tensors(each_checkpoint), dtype="auto"), logits(loaded)
    with attached(loaded, skeleton(each_checkpoint, dtype="auto")) as module:
        assert differences(again, module) == []
        assert ties(module) == ties(again)
        for name, tensor in tensors_of(module).items():
            assert torch.equal(tensor, tensors_of(again)[name]), name
        assert torch.equal(logits(module), expected)


def test_tensors_of_the_right_dtype_are_not_copied(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint)
    addresses = {tensor.data_ptr() for tensor in tensors.values()}
    module = load(checkpoint, tensors, dtype="float32")
    assert {parameter.data_ptr() for parameter in module.parameters()} == addresses
    assert not tensors


def test_tensors_of_another_dtype_are_freed_one_by_one(checkpoint: Path) -> None:
    tensors = Watched(read_tensors(checkpoint))
    module = load(checkpoint, tensors, dtype="bfloat16")
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    # Transformers converts a few at a time; when it takes the last, most others must be gone.
    assert len(tensors.alive_when_taken) == 20
    assert tensors.alive_when_taken[-1] < 10
    gc.collect()
    assert tensors.alive() == 0


def test_no_gradients_are_kept(checkpoint: Path) -> None:
    for module in (load(checkpoint, read_tensors(checkpoint), dtype="auto"), skeleton(checkpoint, dtype="auto")):
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_every_tensor_that_does_not_fit_is_named(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    tensors["score.weight"] = torch.zeros(1)
    with pytest.raises(ConfigError) as caught:
        load(checkpoint, tensors, dtype="auto")
    message = caught.value.message
    assert "missing: model.norm.weight" in message
    assert "unknown to this architecture: score.weight" in message
    assert "wrong shape: model.layers.0.mlp.up_proj.weight is [3, 3] instead of [128, 64]" in message
    assert str(checkpoint) in message


@pytest.mark.parametrize("count", [0, 1])
def test_a_checkpoint_with_almost_nothing_in_it_is_refused_in_one_line(checkpoint: Path, count: int) -> None:
    tensors = dict(list(read_tensors(checkpoint).items())[:count])
    with pytest.raises(ConfigError, match=r"missing: .*and \d+ more"):
        load(checkpoint, tensors, dtype="auto")


def test_an_expert_that_is_missing_or_misshapen_is_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, architecture="qwen3-moe")
    name = next(name for name in read_tensors(directory) if "experts.1.up_proj" in name)
    without = read_tensors(directory)
    del without[name]
    with pytest.raises(ConfigError, match="do not fit"):
        load(directory, without, dtype="auto")
    misshapen = read_tensors(directory) | {name: torch.zeros(5, 5)}
    with pytest.raises(ConfigError, match="do not fit"):
        load(directory, misshapen, dtype="auto")


def test_what_transformers_declares_ignorable_is_ignored(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert torch.equal(
        logits(load(checkpoint, tensors, dtype="auto")),
        logits(load(checkpoint, read_tensors(checkpoint), dtype="auto")),
    )


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to(checkpoint: Path, equal: bool) -> None:
    tensors = read_tensors(checkpoint)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if equal else embedding * 2
    loaded = load(checkpoint, tensors, dtype="auto")
    assert bool(ties(loaded)) == equal
    expected = logits(loaded)
    with attached(loaded, skeleton(checkpoint, dtype="auto")) as module:
        assert torch.equal(logits(module), expected)


def test_a_config_that_asks_for_other_files_or_other_code_gets_neither(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    asked = {"transformers_weights": "elsewhere.bin", "fusion_config": {"nothing_known": True}, "auto_map": {"x": "y"}}
    (tmp_path / "config.json").write_text(json.dumps(config | asked))
    module: Any = load(tmp_path, read_tensors(checkpoint), dtype="auto")
    assert not any(hasattr(module.config, name) for name in asked)
    assert torch.equal(logits(module), logits(load(checkpoint, read_tensors(checkpoint), dtype="auto")))


def test_nothing_is_printed_and_nothing_connects(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: pytest.fail(f"the network was used: {args}"))
    load(checkpoint, read_tensors(checkpoint), dtype="auto")
    with pytest.raises(ConfigError):
        load(checkpoint, {}, dtype="auto")
    assert capfd.readouterr() == ("", "")


def test_a_config_that_is_no_language_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for changes in ({"model_type": "clip"}, {"hidden_size": 63}, {"num_attention_heads": 0}, {"hidden_act": "nothing"}):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ConfigError, match=r"config\.json"):
            load(tmp_path, read_tensors(checkpoint), dtype="auto")


class Watched(dict[str, torch.Tensor]):
    """Notes how many of its tensors still exist whenever one is taken out."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._originals = [weakref.ref(tensor) for tensor in tensors.values()]
        self.alive_when_taken: list[int] = []

    def pop(self, name: str, *default: Any) -> Any:
        self.alive_when_taken.append(self.alive())
        return super().pop(name, *default)

    def alive(self) -> int:
        return sum(original() is not None for original in self._originals)


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)


def described(module: torch.nn.Module) -> Description:
    return {
        name: (tuple(tensor.shape), tensor.dtype, isinstance(tensor, torch.nn.Parameter))
        for name, tensor in tensors_of(module).items()
    }


def ties(module: torch.nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def logits(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = module(PROMPT).logits
    return found


@contextmanager
def attached(original: torch.nn.Module, bare: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Pack a model and attach it to a skeleton that was built independently."""
    backend = MemfdBackend()
    packed = pack(original, backend)
    with ExitStack() as owned:
        owned.callback(packed.close)
        mappings = [
            owned.enter_context(backend.map(slab, size))
            for slab, size in zip(packed.slabs, packed.layout.slab_sizes, strict=True)
        ]
        attach(bare, packed.layout, mappings)
        yield bare
