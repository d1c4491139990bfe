"""The real model gives the same tokens from disk, attached, and attached after its keeper was killed."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch

from appliance.engine import disk
from appliance.engine.answer import Piece, Sampling
from appliance.engine.configs import load_sampling_defaults
from appliance.engine.generation import LanguageModel
from appliance.engine.tokenizer import load_tokenizer
from appliance.engine.weights import obtain
from appliance.manifest.load import load_manifest
from appliance.up.supervisor import Supervisor
from appliance.up.units import units
from appliance.verdict import Outcome
from tests.sites import MODEL, Site

pytestmark = [pytest.mark.model, pytest.mark.timeout(1500)]

WEIGHTS = f"weights@{MODEL}"
TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time",
    "The three laws of thermodynamics are",
    "SELECT name FROM users WHERE",
    "To restart a service on Linux, run",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "My favourite recipe for bread:",
    "A file descriptor is",
    "The mitochondria is",
    "Dear Sir or Madam,",
    "import torch\n",
    "The opposite of hot is",
    "In 1969, humans first",
    "Q: What is 12 times 12?\nA:",
    "List three colours:",
    "The quick brown fox",
    "To be, or not to be,",
)

Answers = list[tuple[int, ...]]


class Silent:
    """Prints nothing of what the keeper says."""

    def line(self, name: str, text: str, *, serious: bool = False) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, model_checkpoint: Path) -> Site:
    return Site(tmp_path_factory.mktemp("equivalence"), model_checkpoint)


@pytest.fixture(autouse=True)
def models_are_gone() -> Iterator[None]:
    """A model that has generated refers to itself, and its weights stay mapped until the collector finds it."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def from_disk(site: Site) -> Answers:
    answers = tokens_of(disk.load_verified(site.target()).module, site)
    assert len({answer[:8] for answer in answers}) > len(PROMPTS) // 2, "answers that all begin alike prove little"
    return answers


@pytest.fixture(scope="module")
def from_memory(site: Site) -> tuple[Answers, Answers]:
    """What two engines said that attached to one load: before and after its keeper was killed."""

    async def attach_kill_and_attach(supervisor: Supervisor) -> tuple[Answers, Answers]:
        first = await asyncio.to_thread(attached, site)
        before = await asyncio.to_thread(site.status)
        await supervisor.kill(WEIGHTS)
        await supervisor.wait_ready(WEIGHTS, 120)
        after = await asyncio.to_thread(site.status)
        assert after["pid"] != before["pid"]
        assert after["shards"] == before["shards"]
        return first, await asyncio.to_thread(attached, site)

    return asyncio.run(with_keeper(site, attach_kill_and_attach))


def test_an_attached_engine_gives_the_tokens_that_disk_gives(
    from_memory: tuple[Answers, Answers], from_disk: Answers
) -> None:
    assert from_memory[0] == from_disk


def test_so_does_one_that_attaches_after_its_keeper_was_killed(
    from_memory: tuple[Answers, Answers], from_disk: Answers
) -> None:
    assert from_memory[1] == from_disk


async def with_keeper(
    site: Site, act: Callable[[Supervisor], Awaitable[tuple[Answers, Answers]]]
) -> tuple[Answers, Answers]:
    keeper = [unit for unit in units(load_manifest(site.manifest), site.manifest) if unit.name == WEIGHTS]
    (site.folder / "runtime").mkdir(exist_ok=True)
    async with Supervisor(keeper, Silent(), runtime=site.folder / "runtime") as supervisor:
        await supervisor.wait_ready(WEIGHTS, 300)
        return await act(supervisor)


def attached(site: Site) -> Answers:
    weights = obtain(site.target(), client_name="test")
    assert weights.verdict.outcome is Outcome.HIT
    assert weights.client is not None
    try:
        return tokens_of(weights.module, site)
    finally:
        weights.client.close()


def tokens_of(module: torch.nn.Module, site: Site) -> Answers:
    tokenizer, defaults = load_tokenizer(site.checkpoint), load_sampling_defaults(site.checkpoint)
    model = LanguageModel(module, tokenizer, defaults=defaults)
    answers = []
    for prompt in PROMPTS:
        pieces: list[Piece] = []
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
        model.generate(tokenizer.encode(prompt), sampling, emit=pieces.append, cancelled=threading.Event())
        answers.append(tuple(token for piece in pieces for token in piece.token_ids))
    return answers
