"""Memory for the tensors of a read, and a read into it."""

from pathlib import Path

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.manifest import CheckpointManifest
from appliance.checkpoint.reader import VerifiedRead, read_verified
from appliance.checkpoint.safetensors import TensorInfo


class Memory:
    """Allocates, and remembers what for."""

    def __init__(self) -> None:
        self.tensors: dict[str, bytearray] = {}
        self.asked: list[TensorInfo] = []

    def __call__(self, tensor: TensorInfo) -> bytearray:
        self.asked.append(tensor)
        self.tensors[tensor.name] = bytearray(tensor.size_bytes)
        return self.tensors[tensor.name]


def refused(tensor: TensorInfo) -> bytearray:
    """Stand in for an allocator that must not be asked."""
    raise AssertionError(f"nothing should have been allocated for {tensor.name}")


def read(checkpoint: Path, manifest: CheckpointManifest | None = None) -> tuple[VerifiedRead, Memory]:
    """Read a checkpoint; by default, one that is as its manifest says."""
    memory = Memory()
    done = read_verified(checkpoint, manifest or digest_checkpoint(checkpoint), allocate=memory)
    return done, memory
