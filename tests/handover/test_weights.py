"""Weights that take the place of others of the same target, on a GPU that has no room for both."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
import torch

from appliance.descriptors import close_all
from appliance.errors import ResourceError
from appliance.handover.source import Loaded
from appliance.handover.weights import Weights
from appliance.keeper.settings import Slot
from appliance.tensors.homes import Stage
from appliance.verdict import Outcome
from tests.handover.obtaining import obtained
from tests.keeper.serving import Serving
from tests.service_manager import ServiceManager
from tests.slabs.cpu_gpu import installed
from tests.slabs.fake_driver import GRANULARITY_BYTES, FakeCuda, FakeGpu

UUID = "GPU-00000000-0000-0000-0000-0000000000a0"
SMALL, LARGE, TOO_LARGE = 2 * GRANULARITY_BYTES, 5 * GRANULARITY_BYTES, 7 * GRANULARITY_BYTES
TOTAL = 6 * GRANULARITY_BYTES
CONFIGS = {"config.json": b"{}"}


class Sized:
    """A model of one parameter of so many bytes, which is a fact of its fingerprint, as what shapes weights is."""

    role: Final = "target"
    rank: Final = 0
    device: Final = UUID
    stages: tuple[Stage, ...] = ("loaded",)
    opaque: Collection[type] = ()
    unused: Collection[str] = ()

    def __init__(self, size_bytes: int, fake: FakeCuda) -> None:
        self._size_bytes = size_bytes
        self._fake = fake
        self.free_bytes: int | None = None  # when it began to load

    def facts(self, configs: Mapping[str, bytes]) -> Mapping[str, object]:
        return {"model.size": self._size_bytes}

    def skeleton(self, configs: Mapping[str, bytes]) -> torch.nn.Module:
        return self._module("meta")

    def load(self, stage: Stage, on_progress: Callable[[str], None]) -> Loaded:
        self.free_bytes = self._fake._free_bytes(0)
        return Loaded(self._module("cpu"), dict(CONFIGS), {}, {})

    def finish(self, module: torch.nn.Module, stage: Stage) -> torch.nn.Module:
        return module

    def _module(self, device: str) -> torch.nn.Module:
        module = torch.nn.Module()
        values = torch.full((self._size_bytes,), self._size_bytes % 251, dtype=torch.uint8, device=device)
        module.weight = torch.nn.Parameter(values, requires_grad=False)
        return module


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with installed(FakeCuda([FakeGpu(UUID, total_bytes=TOTAL)])) as fake:
        yield fake


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as manager:
        yield manager


@pytest.fixture
def serving(tmp_path: Path, manager: ServiceManager, fake: FakeCuda) -> Iterator[Serving]:
    with Serving(tmp_path, environ=manager.environ, layout=[Slot("target", 0, UUID)]) as serving:
        yield serving


def let_go(serving: Serving, manager: ServiceManager, weights: Weights) -> None:
    """End an engine: its lease, and what it has mapped."""
    assert weights.client is not None
    weights.client.close()
    weights.module.weight = None  # type: ignore[assignment]
    gc.collect()
    # A record of all that was said, with duplicates of its own.
    close_all(descriptor for datagram in manager.datagrams for descriptor in datagram.descriptors)
    serving.wait_until(lambda: not serving.holdings.leases)


def donate(serving: Serving, manager: ServiceManager, fake: FakeCuda, size_bytes: int) -> str:
    """Have an engine of this size come and go; return what the keeper holds of it."""
    weights = obtained(serving, Sized(size_bytes, fake))
    assert weights.verdict.outcome is Outcome.DONATED
    let_go(serving, manager, weights)
    return weights.record.shard_id


@pytest.mark.parametrize(("before", "after"), [(LARGE, SMALL), (SMALL, LARGE)])
def test_what_is_replaced_is_gone_before_anything_of_the_new_is_read(
    serving: Serving, manager: ServiceManager, fake: FakeCuda, before: int, after: int
) -> None:
    old = donate(serving, manager, fake, before)
    source = Sized(after, fake)
    weights = obtained(serving, source)
    assert weights.verdict.outcome is Outcome.DONATED
    assert source.free_bytes == TOTAL
    assert weights.module.state_dict()["weight"].unique().tolist() == [after % 251]
    assert serving.call(lambda: [shard.record.size_bytes for shard in serving.holdings.shards()]) == [after]
    assert not [name for name in manager.names() if old in name]
    let_go(serving, manager, weights)
    again = obtained(serving, Sized(after, fake))
    assert again.verdict.outcome is Outcome.HIT
    let_go(serving, manager, again)


def test_what_is_in_use_is_not_replaced_and_nothing_is_read(
    serving: Serving, manager: ServiceManager, fake: FakeCuda
) -> None:
    weights = obtained(serving, Sized(LARGE, fake))
    source = Sized(SMALL, fake)
    with pytest.raises(ResourceError, match="in use by engine@m"):
        obtained(serving, source)
    assert source.free_bytes is None
    assert weights.module.state_dict()["weight"].unique().tolist() == [LARGE % 251]
    let_go(serving, manager, weights)


def test_what_does_not_fit_in_place_of_the_old_leaves_an_empty_slot_and_all_of_the_memory(
    serving: Serving, manager: ServiceManager, fake: FakeCuda
) -> None:
    donate(serving, manager, fake, SMALL)
    with pytest.raises(ResourceError, match="GPU-"):
        obtained(serving, Sized(TOO_LARGE, fake))
    serving.wait_until(lambda: not serving.holdings.loading)
    assert serving.call(lambda: serving.holdings.unattended) == [("target", 0)]
    assert (fake._free_bytes(0), manager.names()) == (TOTAL, [])
    donate(serving, manager, fake, LARGE)
