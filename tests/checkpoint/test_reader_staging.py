"""The verified read of tensors that only pass through memory."""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.reader import read_verified
from appliance.checkpoint.safetensors import TensorInfo
from appliance.errors import TrustError
from tests.checkpoint.checkpoints import SHARDS, flip_a_byte
from tests.checkpoint.memory import Memory

pytestmark = pytest.mark.usefixtures("reader_pieces")

_, SECOND = SHARDS


class Windows:
    """Staging: two windows of fixed size used in turn, and what went through them."""

    def __init__(self, tensors: Sequence[TensorInfo], wanted: frozenset[str]) -> None:
        self.size_bytes = sum(tensor.size_bytes for tensor in tensors)
        self.wanted = wanted
        self.out: deque[memoryview] = deque()
        self.passed = bytearray()
        self.most_out = 0

    def pieces(self) -> Iterator[list[memoryview]]:
        windows = [memoryview(bytearray(16)) for _ in range(2)]
        for number, begin in enumerate(range(0, self.size_bytes, 16)):
            window = windows[number % 2][: min(16, self.size_bytes - begin)]
            self.out.append(window)
            self.most_out = max(self.most_out, len(self.out))
            yield [window]

    def hashed(self) -> None:
        self.passed += self.out.popleft()


class TestStaging:
    """Tensors that only pass through memory: the same bytes, the same checks."""

    def test_every_byte_passes_in_order_and_two_windows_are_enough(self, checkpoint: Path) -> None:
        made: list[Windows] = []

        def stage(tensors: Sequence[TensorInfo], wanted: frozenset[str]) -> Windows:
            made.append(Windows(tensors, wanted))
            return made[-1]

        done = read_verified(checkpoint, digest_checkpoint(checkpoint), stage=stage)
        contents = [b"".join(data for _, _, data in shard.values()) for shard in SHARDS.values()]
        assert [bytes(windows.passed) for windows in made] == contents
        assert [windows.wanted for windows in made] == [set(shard) for shard in SHARDS.values()]
        assert all(windows.most_out <= 2 and not windows.out for windows in made)
        assert set(done.tensors) == set(SHARDS)

    def test_a_changed_byte_is_refused(self, checkpoint: Path) -> None:
        manifest = digest_checkpoint(checkpoint)
        flip_a_byte(checkpoint / SECOND)
        with pytest.raises(TrustError, match=SECOND):
            read_verified(checkpoint, manifest, stage=Windows)

    def test_neither_or_both_ways_is_a_bug(self, checkpoint: Path) -> None:
        manifest = digest_checkpoint(checkpoint)
        with pytest.raises(ValueError, match="memory"):
            read_verified(checkpoint, manifest)
        with pytest.raises(ValueError, match="memory"):
            read_verified(checkpoint, manifest, allocate=Memory(), stage=Windows)
