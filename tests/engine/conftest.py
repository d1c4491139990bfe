"""The tiny checkpoint and its model, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from appliance.engine.configs import load_sampling_defaults
from appliance.engine.generation import LanguageModel
from appliance.engine.model import load
from appliance.engine.tokenizer import load_tokenizer
from tests.engine.checkpoints import make_checkpoint, read_tensors
from tests.engine.serving import Held, Served, held_model, serving


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> Iterator[None]:
    """A model this small is only slowed down by a second thread, and much so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def language_model(checkpoint: Path) -> LanguageModel:
    module = load(checkpoint, read_tensors(checkpoint), dtype="auto")
    return LanguageModel(module, load_tokenizer(checkpoint), defaults=load_sampling_defaults(checkpoint))


@pytest.fixture
def served(language_model: LanguageModel) -> Iterator[Served]:
    with serving(language_model) as server:
        yield server


@pytest.fixture(scope="session")
def held(checkpoint: Path) -> Held:
    return held_model(checkpoint)
