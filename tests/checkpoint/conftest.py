"""A signed checkpoint and the keys it is signed with."""

from pathlib import Path

import pytest

from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import PrivateKey, generate_key, load_private_key
from tests.checkpoint.checkpoints import make_checkpoint


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
