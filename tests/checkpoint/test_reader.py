"""The verified read: all bytes once, what is hashed is what is used, and the first wrong file is named."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from appliance.checkpoint import reader
from appliance.checkpoint.contents import check_configs
from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.file_stream import FileStream
from appliance.checkpoint.identity import Trust, check_stats, identify
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import PrivateKey
from appliance.checkpoint.manifest import ALGORITHMS, Algorithm
from appliance.checkpoint.reader import read_verified
from appliance.checkpoint.safetensors import TensorInfo
from appliance.checkpoint.signature import sign
from appliance.checkpoint.streams import Progress
from appliance.errors import ConfigError, TrustError
from tests.checkpoint.checkpoints import (
    CONFIG,
    MUTATIONS,
    SHARDS,
    TOKENIZER,
    flip_a_byte,
    framed,
    header_text,
    index_bytes,
    make_checkpoint,
    make_hub_snapshot,
    noise,
    safetensors_bytes,
)
from tests.checkpoint.memory import Memory, read, refused
from tests.checkpoint.opened import files_opened

pytestmark = pytest.mark.usefixtures("reader_pieces")

FIRST, SECOND = SHARDS

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("make", [make_checkpoint, make_hub_snapshot])
def test_every_tensor_arrives_and_every_file_is_accounted_for(
    tmp_path: Path, make: Callable[[Path], Path], algorithm: Algorithm
) -> None:
    checkpoint = make(tmp_path / "x")
    manifest = digest_checkpoint(checkpoint, algorithm=algorithm)
    done, memory = read(checkpoint, manifest)
    assert memory.tensors == {name: data for shard in SHARDS.values() for name, (_, _, data) in shard.items()}
    shapes = {name: (dtype, shape) for shard in SHARDS.values() for name, (dtype, shape, _) in shard.items()}
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in memory.asked} == shapes
    assert done.configs == {
        "config.json": CONFIG,
        "tokenizer/tokenizer.json": TOKENIZER,
        INDEX: index_bytes(),
    }
    assert set(done.files) == set(manifest.digests)
    assert all(stat.size_bytes == (checkpoint / path).stat().st_size for path, stat in done.files.items())
    assert done.tensors == {path: tuple(t for t in memory.asked if t.name in SHARDS[path]) for path in SHARDS}
    assert done.metadata == {path: {"format": "pt"} for path in SHARDS}
    assert done.size_bytes == sum(stat.size_bytes for stat in done.files.values())
    assert done.read_s > 0
    check_configs(manifest, done.configs)


def test_each_file_is_opened_once_and_each_byte_read_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = digest_checkpoint(checkpoint)
    counts: Counter[str] = Counter()
    preadv, pread = os.preadv, os.pread

    def name(fd: int) -> str:
        return str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(checkpoint))

    def counted_preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        count = preadv(fd, buffers, offset, flags)
        counts[name(fd)] += count
        return count

    def counted_pread(fd: int, size: int, offset: int) -> bytes:
        data = pread(fd, size, offset)
        counts[name(fd)] += len(data)
        return data

    monkeypatch.setattr(os, "preadv", counted_preadv)
    monkeypatch.setattr(os, "pread", counted_pread)
    with files_opened(checkpoint) as opened:
        done, _ = read(checkpoint, manifest)
    assert sorted(opened) == sorted(manifest.digests)
    assert counts == {path: stat.size_bytes for path, stat in done.files.items()}


def test_the_stats_are_those_that_a_later_check_compares(
    checkpoint: Path, private_key: PrivateKey, keyring: Keyring
) -> None:
    sign(checkpoint, private_key)
    identity = identify(checkpoint, Trust.signed(keyring))
    done, _ = read(checkpoint, identity.manifest)
    assert check_stats(identity, done.files) == ()
    flip_a_byte(checkpoint / SECOND)
    assert check_stats(identity, done.files) == (SECOND,)


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("path", [FIRST, SECOND, "config.json", INDEX, "tokenizer/tokenizer.json", "training_args.bin"])
def test_each_mutation_of_each_file_is_refused_by_name(checkpoint: Path, path: str, name: str) -> None:
    manifest = digest_checkpoint(checkpoint)
    MUTATIONS[name](checkpoint / path)
    with pytest.raises(TrustError, match=path):
        read(checkpoint, manifest)


def test_each_flipped_byte_of_a_shard_is_a_trust_error_whatever_it_hits(checkpoint: Path) -> None:
    """Header length, header text, padding, tensors: the file is not what was signed, and that is what is said."""
    manifest = digest_checkpoint(checkpoint)
    good = (checkpoint / SECOND).read_bytes()
    for at in range(0, len(good), 3):
        data = bytearray(good)
        data[at] ^= 4
        (checkpoint / SECOND).write_bytes(data)
        with pytest.raises(TrustError, match=f"{SECOND} is not the file that was signed"):
            read(checkpoint, manifest)


def test_zeros_for_a_tensor_with_every_header_as_it_was_are_refused(checkpoint: Path) -> None:
    manifest = digest_checkpoint(checkpoint)
    data = (checkpoint / FIRST).read_bytes()
    (checkpoint / FIRST).write_bytes(data.replace(noise("norm", 32), bytes(32)))
    with pytest.raises(TrustError, match=f"{FIRST} is not the file"):
        read(checkpoint, manifest)


def test_an_unsigned_file_is_not_read_and_not_loaded(checkpoint: Path) -> None:
    manifest = digest_checkpoint(checkpoint)
    (checkpoint / "evil.safetensors").write_bytes(safetensors_bytes({"embed.weight": ("U8", (1,), b"x")}))
    (checkpoint / "evil.json").write_text("{}")
    with files_opened(checkpoint) as opened:
        done, _ = read(checkpoint, manifest)
    assert not {"evil.safetensors", "evil.json"} & {*opened, *done.configs, *done.files}


def test_a_link_that_was_turned_outside_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    manifest = digest_checkpoint(checkpoint)
    (checkpoint / FIRST).rename(tmp_path / "elsewhere")
    (checkpoint / FIRST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrustError, match=f"{FIRST} is a link that leads out"):
        read(checkpoint, manifest)


def test_the_library_reads_the_same(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(1000, dtype=np.float32).reshape(10, 100),
        "b": np.zeros((0, 3), dtype=np.int64),
        "c": np.array(3.5, dtype=np.float16),
        "d": np.arange(77, dtype=np.uint8),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    memory = {name: np.empty_like(array) for name, array in arrays.items()}
    manifest = digest_checkpoint(tmp_path)
    done = read_verified(tmp_path, manifest, allocate=lambda tensor: memory[tensor.name].data)
    for name, array in arrays.items():
        np.testing.assert_array_equal(memory[name], array)
    assert done.metadata == {"model.safetensors": {"format": "np"}}


class TestChangesMeanwhile:
    """A file that changes between its opening and its last byte is refused, also when its digest would be right."""

    @pytest.mark.parametrize("path", [FIRST, "config.json", "training_args.bin"])
    def test_while_it_is_read(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        manifest = digest_checkpoint(checkpoint)
        real = FileStream.finish

        def touch(stream: FileStream) -> None:
            if stream.path == path:
                os.utime(checkpoint / path, ns=(1, 1))
            real(stream)

        monkeypatch.setattr(FileStream, "finish", touch)
        with pytest.raises(TrustError, match=f"{path} changed while it was read"):
            read(checkpoint, manifest)

    def test_after_its_header_was_read(self, checkpoint: Path) -> None:
        manifest = digest_checkpoint(checkpoint)
        memory = Memory()

        def allocate(tensor: TensorInfo) -> bytearray:
            if not memory.asked:
                os.truncate(checkpoint / FIRST, (checkpoint / FIRST).stat().st_size - 1)
            return memory(tensor)

        with pytest.raises(TrustError, match=f"{FIRST} (was cut short|changed) while"):
            read_verified(checkpoint, manifest, allocate=allocate)


class TestSignedButWrong:
    """Files as they were signed that cannot be loaded: a ConfigError that names the file, and nothing allocated."""

    def check(self, checkpoint: Path, reason: str, *, suspect: str) -> None:
        manifest = digest_checkpoint(checkpoint)
        with pytest.raises(ConfigError, match=reason):
            read_verified(checkpoint, manifest, allocate=refused)
        # The same fault in a file that is not the signed one is not a fault but a lack of trust.
        flip_a_byte(checkpoint / suspect)
        with pytest.raises(TrustError, match=f"{suspect} is not the file"):
            read_verified(checkpoint, manifest, allocate=refused)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"\0\0\0", "3 bytes are too few"),
            (framed(b"{}")[:8] + b"\xff", "announces a header of 2 bytes and is only 9"),
            (b"\xff" * 8 + b"{}", "announces a header of 18446744073709551615 bytes"),
            (framed(b"[]"), "not a safetensors header"),
            (framed(b'{"a":' * 50_000), "not a safetensors header"),
            (framed(b'{"a":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,4]}}', b"xxxx"), "does not fill"),
            (safetensors_bytes({"a": ("U8", (3,), b"xyz")})[:-1], "should be .* bytes long"),
            (safetensors_bytes({"a": ("U8", (3,), b"xyz")}) + b"x", "should be .* bytes long"),
        ],
        ids=lambda value: repr(value)[:30],
    )
    def test_a_hostile_header(self, checkpoint: Path, data: bytes, reason: str) -> None:
        (checkpoint / SECOND).write_bytes(data)
        self.check(checkpoint, f"{SECOND}.* {reason}", suspect=SECOND)

    def test_a_file_that_lacks_a_tensor_the_index_places_in_it(self, checkpoint: Path) -> None:
        (checkpoint / SECOND).write_bytes(safetensors_bytes({"scale": ("F32", (), b"1234")}))
        self.check(checkpoint, rf"{SECOND} lacks tensor 'layer\.weight'", suspect=SECOND)

    def test_an_index_that_names_a_missing_file(self, checkpoint: Path) -> None:
        (checkpoint / SECOND).unlink()
        self.check(checkpoint, f"index.json: names {SECOND}, which is not in the checkpoint", suspect=INDEX)

    def test_an_index_that_is_no_json(self, checkpoint: Path) -> None:
        (checkpoint / INDEX).write_bytes(b"{" + index_bytes())
        self.check(checkpoint, "index.json: not valid JSON", suspect=INDEX)

    def test_one_tensor_in_two_files_without_an_index(self, checkpoint: Path) -> None:
        (checkpoint / INDEX).unlink()
        (checkpoint / SECOND).write_bytes((checkpoint / FIRST).read_bytes())
        self.check(checkpoint, f"tensor .* is in {FIRST} and {SECOND}", suspect=SECOND)

    def test_configs_that_are_too_large(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reader, "MAX_CONFIGS_BYTES", 1000)
        (checkpoint / "huge.txt").write_bytes(bytes(1001))
        with pytest.raises(ConfigError, match=r"more than the 1000 allowed; the largest is huge\.txt"):
            read_verified(checkpoint, digest_checkpoint(checkpoint), allocate=refused)


def test_the_index_decides_which_file_a_tensor_comes_from(checkpoint: Path) -> None:
    both = dict(SHARDS[SECOND], **{"norm.weight": ("F32", (8,), noise("another norm", 32))})
    (checkpoint / SECOND).write_bytes(safetensors_bytes(both))
    done, memory = read(checkpoint)
    assert memory.tensors["norm.weight"] == noise("norm", 32)
    assert "norm.weight" not in {tensor.name for tensor in done.tensors[SECOND]}
    assert memory.tensors["scale"] == noise("scale", 4)


def test_a_tensor_that_the_index_forgot_is_loaded_all_the_same(checkpoint: Path) -> None:
    both = dict(SHARDS[SECOND], forgotten=("U8", (4,), b"word"))
    (checkpoint / SECOND).write_bytes(safetensors_bytes(both))
    _, memory = read(checkpoint)
    assert memory.tensors["forgotten"] == b"word"


def test_allocation_happens_here_in_order_and_after_every_header(checkpoint: Path) -> None:
    (checkpoint / SECOND).write_bytes(b"broken")
    manifest = digest_checkpoint(checkpoint)
    with pytest.raises(ConfigError):
        read_verified(checkpoint, manifest, allocate=refused)
    (checkpoint / SECOND).write_bytes(safetensors_bytes(SHARDS[SECOND]))
    _, memory = read(checkpoint)
    names = [tensor.name for tensor in memory.asked]
    assert names == ["embed.weight", "norm.weight", "empty", "layer.weight", "scale"]


class TestMemory:
    def test_memory_of_another_size_or_read_only_is_a_bug(self, checkpoint: Path) -> None:
        manifest = digest_checkpoint(checkpoint)
        wrongs: list[Callable[[int], memoryview]] = [
            lambda size: memoryview(bytearray(size + 1)),
            lambda size: memoryview(bytes(size)),
            lambda size: memoryview(bytearray(2 * size))[::2],
        ]
        for wrong in wrongs:
            with pytest.raises(ValueError, match="writable contiguous"):
                read_verified(checkpoint, manifest, allocate=lambda tensor, wrong=wrong: wrong(tensor.size_bytes))  # type: ignore[misc]

    def test_what_the_allocator_raises_comes_out(self, checkpoint: Path) -> None:
        def full(tensor: TensorInfo) -> bytearray:
            raise MemoryError("full")

        with pytest.raises(MemoryError, match="full"):
            read_verified(checkpoint, digest_checkpoint(checkpoint), allocate=full)


def test_progress_counts_all_files_and_all_bytes(checkpoint: Path) -> None:
    seen: list[Progress] = []
    done = read_verified(checkpoint, digest_checkpoint(checkpoint), allocate=Memory(), on_progress=seen.append)
    assert seen[-1] == Progress(6, 6, done.size_bytes, done.size_bytes)
    assert {progress.files_total for progress in seen} == {6}
    assert [progress.bytes_done for progress in seen] == sorted(progress.bytes_done for progress in seen)


def test_a_single_file_and_no_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(framed(header_text({"a": ("U8", (3,), b"xyz")}), b"xyz"))
    (tmp_path / "consolidated.safetensors").write_bytes(b"not looked into")
    done, memory = read(tmp_path)
    assert memory.tensors == {"a": b"xyz"} and set(done.files) == {"model.safetensors", "consolidated.safetensors"}


def test_no_weights_at_all_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no safetensors file"):
        read(tmp_path)
