"""A checkpoint's tensors on their way to a GPU: read into page-locked memory, hashed there, copied from there.

What is hashed is what is copied: nobody writes the memory in between. The copies run beside reading and hashing, and
the page-locked memory is small, because it is used again as soon as its copy is done.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from appliance.checkpoint.file_stream import Piece
from appliance.checkpoint.files import CheckpointRoot
from appliance.checkpoint.manifest import CheckpointManifest
from appliance.checkpoint.reader import OnConfigs, VerifiedRead, read_verified
from appliance.checkpoint.safetensors import TensorInfo
from appliance.checkpoint.streams import PIECE_BYTES, OnProgress
from appliance.errors import ResourceError

Allocate = Callable[[TensorInfo], torch.Tensor]

# A target's bytes, and where in the piece they are.
_Copy = tuple[torch.Tensor, int]


def read_to_device(
    checkpoint: Path | CheckpointRoot,
    manifest: CheckpointManifest,
    *,
    device: torch.device,
    allocate: Allocate,
    on_configs: OnConfigs | None = None,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> VerifiedRead:
    """Read a checkpoint's tensors to a device, as `read_verified` reads it to host memory; refuses what that refuses.

    `allocate` is called once a tensor and returns a contiguous tensor of `size_bytes`, on the device or in host memory.
    Nothing may be used before this returns. ResourceError where memory cannot be locked.
    """
    memory = _LockedMemory(device)

    def stage(tensors: Sequence[TensorInfo], wanted: frozenset[str]) -> _FileStaging:
        return _FileStaging([(tensor, _target(tensor, wanted, allocate)) for tensor in tensors], memory)

    read = read_verified(
        checkpoint, manifest, stage=stage, on_configs=on_configs, threads=threads, on_progress=on_progress
    )
    memory.finish()
    return read


class _FileStaging:
    """`reader.Staging` of one file."""

    def __init__(self, parts: Sequence[tuple[TensorInfo, torch.Tensor | None]], memory: "_LockedMemory") -> None:
        self._parts = parts
        self._memory = memory
        self._out: deque[tuple[torch.Tensor, list[_Copy]]] = deque()

    def pieces(self) -> Iterator[Piece]:
        piece: torch.Tensor | None = None
        copies: list[_Copy] = []
        used = 0
        for tensor, target in self._parts:
            begin = 0
            while begin < tensor.size_bytes:
                if piece is None:
                    piece, copies, used = self._memory.lend(), [], 0
                end = min(tensor.size_bytes, begin + PIECE_BYTES - used)
                if target is not None:
                    copies.append((target[begin:end], used))
                used += end - begin
                begin = end
                if used == PIECE_BYTES:
                    yield self._given(piece, copies, used)
                    piece = None
        if piece is not None:
            yield self._given(piece, copies, used)

    def hashed(self) -> None:
        piece, copies = self._out.popleft()
        self._memory.take_back(piece, copies)

    def _given(self, piece: torch.Tensor, copies: list[_Copy], used: int) -> Piece:
        self._out.append((piece, copies))
        return [piece.numpy().data[:used]]


class _LockedMemory:
    """Pieces of page-locked memory, and the stream that copies from them. For a CPU plain memory and plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            # The targets' memory may still be in use by what was asked of the device before.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._free: SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None]] = SimpleQueue()

    def lend(self) -> torch.Tensor:
        """Return a piece that nobody uses any more, waiting for its last copy; a new one where none is on its way."""
        try:
            piece, copied = self._free.get_nowait()
        except Empty:
            return self._new()
        if copied is not None:
            copied.synchronize()
        return piece

    def take_back(self, piece: torch.Tensor, copies: Sequence[_Copy]) -> None:
        """Start the copies out of a piece; it is lent again when they are done."""
        if self._stream is None:
            for target, at in copies:
                target.copy_(piece[at : at + target.numel()])
            self._free.put((piece, None))
            return
        with torch.cuda.stream(self._stream):
            for target, at in copies:
                target.copy_(piece[at : at + target.numel()], non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._free.put((piece, copied))

    def finish(self) -> None:
        """Return once every copy is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _new(self) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        try:
            # Locked by this GPU's context: without a device torch would open one on the first GPU.
            with torch.cuda.device(self._device):
                return torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise ResourceError(
                f"cannot lock {PIECE_BYTES} bytes of memory for {self._device}: {str(error).splitlines()[0]}",
                hint="raise the unit's LimitMEMLOCK=, or free host memory",
            ) from error


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _target(tensor: TensorInfo, wanted: frozenset[str], allocate: Allocate) -> torch.Tensor | None:
    """Return the tensor's memory as bytes; None for one that is read past."""
    if tensor.name not in wanted:
        return None
    # Other threads write it, and they could not if it were a tensor of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        target = allocate(tensor)
        if target.nbytes != tensor.size_bytes or not target.is_contiguous():
            raise ValueError(f"{tensor.name}: the memory is not {tensor.size_bytes} contiguous bytes")
        return target.detach().reshape(-1).view(torch.uint8)
