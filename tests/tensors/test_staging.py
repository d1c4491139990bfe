import random
from pathlib import Path

import pytest
import torch

from appliance.checkpoint import streams
from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.manifest import CheckpointManifest
from appliance.checkpoint.safetensors import TensorInfo
from appliance.errors import ConfigError, TrustError
from appliance.tensors import staging
from appliance.tensors.staging import read_to_device
from tests.checkpoint.checkpoints import MUTATIONS, SHARDS, Tensors, make_checkpoint, safetensors_bytes

CPU = torch.device("cpu")
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}


def loaded(checkpoint: Path, manifest: CheckpointManifest) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}

    def allocate(info: TensorInfo) -> torch.Tensor:
        tensors[info.name] = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        return tensors[info.name]

    read_to_device(checkpoint, manifest, device=CPU, allocate=allocate, threads=4)
    return tensors


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def digested(checkpoint: Path) -> CheckpointManifest:
    return digest_checkpoint(checkpoint)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (staging, streams):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    return 64


def test_the_tensors_are_the_files(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    tensors = loaded(checkpoint, digested(checkpoint))
    expected = {name: tensor for tensors in SHARDS.values() for name, tensor in tensors.items()}
    assert tensors.keys() == expected.keys()
    for name, (_, shape, data) in expected.items():
        assert (tuple(tensors[name].shape), bytes_of(tensors[name])) == (shape, data), name


def test_tensors_and_pieces_need_not_end_together(tmp_path: Path, small_pieces: int) -> None:
    chance = random.Random(0)
    sizes = [0, 1, small_pieces - 1, small_pieces, small_pieces + 1, 3 * small_pieces, 2, 0, 5, 7 * small_pieces + 3]
    chance.shuffle(sizes)
    shards: dict[str, Tensors] = {
        f"model-{file}.safetensors": {
            f"{file}.{index}": ("F8_E4M3", (size,), chance.randbytes(size)) for index, size in enumerate(sizes * 5)
        }
        for file in range(6)
    }
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path, tensors in shards.items():
        (folder / path).write_bytes(safetensors_bytes(tensors))
    found = loaded(folder, digested(folder))
    for tensors in shards.values():
        for name, (_, _, data) in tensors.items():
            assert bytes_of(found[name]) == data, name


def test_memory_is_used_again(tmp_path: Path, small_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    new = staging._LockedMemory._new

    def counted(self: staging._LockedMemory) -> torch.Tensor:
        made.append(new(self))
        return made[-1]

    monkeypatch.setattr(staging._LockedMemory, "_new", counted)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    data = random.Random(0).randbytes(1000 * small_pieces)
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"weight": ("F8_E4M3", (len(data),), data)}))
    assert bytes_of(loaded(folder, digested(folder))["weight"]) == data
    # One is read, one is hashed, one waits to be read while the other is taken back.
    assert len(made) <= 3


def test_a_tensor_that_the_index_places_elsewhere_is_read_past(tmp_path: Path, small_pieces: int) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    first, second = SHARDS
    both = {**SHARDS[second], "norm.weight": ("F32", (8,), bytes(32))}
    (checkpoint / second).write_bytes(safetensors_bytes(both))
    tensors = loaded(checkpoint, digested(checkpoint))
    assert bytes_of(tensors["norm.weight"]) == SHARDS[first]["norm.weight"][2]
    assert bytes_of(tensors["layer.weight"]) == SHARDS[second]["layer.weight"][2]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_file_that_is_not_what_was_signed_is_refused_by_name(tmp_path: Path, mutation: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    manifest = digested(checkpoint)
    name = list(SHARDS)[1]
    MUTATIONS[mutation](checkpoint / name)
    with pytest.raises(TrustError, match=name):
        loaded(checkpoint, manifest)


def test_a_file_without_bytes_of_tensors_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"empty": ("F32", (0, 3), b"")}))
    assert loaded(folder, digested(folder))["empty"].shape == (0, 3)


def test_memory_of_another_size_is_a_bug_that_is_told(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    for wrong in (torch.empty(3), torch.empty(16, 16)[:, ::2]):

        def allocate(info: TensorInfo, wrong: torch.Tensor = wrong) -> torch.Tensor:
            return wrong

        with pytest.raises(ValueError, match="contiguous bytes"):
            read_to_device(checkpoint, digested(checkpoint), device=CPU, allocate=allocate)


def test_an_allocation_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")

    def allocate(info: TensorInfo) -> torch.Tensor:
        raise ConfigError(f"{info.name}: no")

    with pytest.raises(ConfigError, match="no"):
        read_to_device(checkpoint, digested(checkpoint), device=CPU, allocate=allocate)


def test_tensors_of_inference_mode_can_be_filled(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    with torch.inference_mode():
        tensors = loaded(checkpoint, digested(checkpoint))
    assert bytes_of(tensors["scale"]) == SHARDS["model-00002-of-00002.safetensors"]["scale"][2]
