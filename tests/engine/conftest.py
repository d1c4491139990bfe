"""The tiny checkpoint and its model, made once."""

from pathlib import Path

import pytest

from appliance.engine.configs import load_sampling_defaults
from appliance.engine.generation import LanguageModel
from appliance.engine.model import load
from appliance.engine.tokenizer import load_tokenizer
from tests.engine.checkpoints import make_checkpoint, read_tensors


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def language_model(checkpoint: Path) -> LanguageModel:
    module = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    return LanguageModel(module, load_tokenizer(checkpoint), defaults=load_sampling_defaults(checkpoint))
