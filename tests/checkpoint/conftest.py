"""A signed checkpoint, the keys it is signed with, and reads in pieces that are small beside it."""

from pathlib import Path

import pytest

from appliance.checkpoint import reader, streams
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import PrivateKey, generate_key, load_private_key
from tests.checkpoint.checkpoints import make_checkpoint
from tests.checkpoint.numbered import PIECE_BYTES


@pytest.fixture(scope="session")
def keys_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`release.key` and `release.pub`, made once for all tests."""
    folder = tmp_path_factory.mktemp("keys")
    generate_key(folder / "release.key")
    return folder


@pytest.fixture
def private_key(keys_dir: Path) -> PrivateKey:
    return load_private_key(keys_dir / "release.key")


@pytest.fixture
def keyring(keys_dir: Path) -> Keyring:
    return Keyring.load([keys_dir])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small sharded checkpoint, not signed."""
    return make_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def reader_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every tensor several pieces long."""
    for module in (streams, reader):
        monkeypatch.setattr(module, "PIECE_BYTES", 50)


@pytest.fixture
def stream_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file many pieces long."""
    monkeypatch.setattr(streams, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(streams, "PART_BYTES", PIECE_BYTES // 3)
    monkeypatch.setattr(streams, "_QUANTUM_BYTES", 4 * PIECE_BYTES)
    monkeypatch.setattr(streams, "_SMALL_BYTES", PIECE_BYTES // 10)
