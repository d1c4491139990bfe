"""Building a model of tensors that stay where they are: what comes out is what comes out of host memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from appliance.engine import model as module
from appliance.engine.in_place import InPlaceTensor, in_place, make_plain
from appliance.engine.model import load
from appliance.tensors.comparison import differences
from tests.engine.checkpoints import ARCHITECTURES, make_checkpoint, read_tensors


@pytest.fixture(scope="module", params=ARCHITECTURES)
def each_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(directory, architecture=request.param, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_model_is_the_same_to_the_last_bit(
    each_checkpoint: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(each_checkpoint, read_tensors(each_checkpoint), dtype=dtype)
    # There is no device here: host memory stands in for one.
    monkeypatch.setattr(module, "in_place", lambda tensor: tensor.as_subclass(InPlaceTensor))
    found = load(each_checkpoint, read_tensors(each_checkpoint), dtype=dtype)
    assert differences(expected, found, values=False) == []
    assert not any(isinstance(tensor, InPlaceTensor) for tensor in (*found.parameters(), *found.buffers()))


def test_every_tensor_of_the_files_is_still_on_its_device_when_the_model_is_built(
    each_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing can be moved away from the meta device: an attempt raises.
    seen: dict[str, torch.Tensor] = {}

    def note(model: Any) -> None:
        seen.update(model.named_parameters())
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "make_plain", note)
    tensors = {name: tensor.to("meta") for name, tensor in read_tensors(each_checkpoint).items()}
    with pytest.raises(KeyboardInterrupt):
        load(each_checkpoint, tensors, dtype="auto")
    assert seen
    assert all(isinstance(tensor, InPlaceTensor) and tensor.is_meta for tensor in seen.values())


def test_only_the_dtype_changes_however_it_is_asked_for() -> None:
    tensor = in_place(torch.empty(2, dtype=torch.float32, device="meta"))
    for found in (
        tensor.to(device="cpu", dtype=torch.float16),
        tensor.to("cpu", torch.float16),
        tensor.to(torch.float16),
    ):
        assert (found.dtype, found.is_meta, type(found)) == (torch.float16, True, InPlaceTensor)
    assert tensor.to("cpu").is_meta
    assert tensor.to(device="cpu", dtype=None).dtype == torch.float32


def test_a_tensor_in_host_memory_is_as_it_was() -> None:
    tensor = torch.zeros(2)
    assert in_place(tensor) is tensor


def test_ties_are_kept_and_memory_is_shared() -> None:
    whole = nn.Parameter(torch.zeros(2, 2).as_subclass(InPlaceTensor), requires_grad=False)
    pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for part in pair:
        part.weight = whole
    make_plain(pair)
    first, second = (part.weight for part in pair)
    assert first is second
    assert type(first) is nn.Parameter
    assert first.data_ptr() == whole.data_ptr()
