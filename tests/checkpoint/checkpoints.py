"""Small real checkpoints, and ways to break them."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CONFIG = b'{"model_type": "llama"}\n'
TOKENIZER = b'{"version": "1.0"}\n'

# name -> (dtype, shape, bytes)
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def header_text(tensors: Tensors, *, metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors header for these tensors, one after the other, padded to eight bytes as the library does."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def safetensors_bytes(tensors: Tensors, *, metadata: Mapping[str, str] | None = None) -> bytes:
    """A whole safetensors file."""
    return framed(header_text(tensors, metadata=metadata), b"".join(data for _, _, data in tensors.values()))


def framed(header: bytes, data: bytes = b"") -> bytes:
    """A file with this header, whatever it says."""
    return len(header).to_bytes(8, "little") + header + data


def noise(name: str, size_bytes: int) -> bytes:
    """Bytes that look random and are the same each time."""
    return hashlib.shake_128(name.encode()).digest(size_bytes)


SHARDS: dict[str, Tensors] = {
    "model-00001-of-00002.safetensors": {
        "embed.weight": ("BF16", (16, 8), noise("embed", 256)),
        "norm.weight": ("F32", (8,), noise("norm", 32)),
        "empty": ("F16", (0, 4), b""),
    },
    "model-00002-of-00002.safetensors": {
        "layer.weight": ("F8_E4M3", (8, 8), noise("layer", 64)),
        "scale": ("F32", (), noise("scale", 4)),
    },
}


def index_bytes(shards: Mapping[str, Tensors] | None = None) -> bytes:
    """The index of sharded files."""
    shards = SHARDS if shards is None else shards
    weight_map = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def make_checkpoint(folder: Path) -> Path:
    """A checkpoint of two shards with an index, configs, one in a directory, and weights in another format."""
    folder.mkdir(parents=True)
    for path, tensors in SHARDS.items():
        (folder / path).write_bytes(safetensors_bytes(tensors, metadata={"format": "pt"}))
    (folder / "model.safetensors.index.json").write_bytes(index_bytes())
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_bytes(TOKENIZER)
    (folder / "training_args.bin").write_bytes(noise("training", 100))
    return folder


def make_hub_snapshot(cache: Path) -> Path:
    """The same checkpoint as a Hugging Face cache keeps it: every file a link to a blob."""
    plain = make_checkpoint(cache / "plain")
    repo = cache / "models--acme--tiny"
    snapshot = repo / "snapshots" / "0123abcd"
    blobs = repo / "blobs"
    blobs.mkdir(parents=True)
    for file in sorted(path for path in plain.rglob("*") if path.is_file()):
        relative = file.relative_to(plain)
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        link = snapshot / relative
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def flip_a_byte(path: Path, *, at: int = -1) -> None:
    """Change one byte of a file; its size stays."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def zero(path: Path) -> None:
    """Overwrite a file with zeros; its size stays."""
    path.write_bytes(bytes(path.stat().st_size))


# Every way in which a file of a checkpoint can stop being what was signed.
MUTATIONS: dict[str, Callable[[Path], None]] = {
    "first byte flipped": lambda path: flip_a_byte(path, at=0),
    "last byte flipped": flip_a_byte,
    "a byte more": lambda path: _append(path, b"\0"),
    "a byte less": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "zeros instead": zero,
}


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
