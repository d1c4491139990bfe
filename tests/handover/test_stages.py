"""Weights are kept processed where the donor has proved that another process gets the same module, else as loaded."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from appliance.errors import PeerError
from appliance.handover.source import Loaded
from appliance.handover.weights import STAGES, Weights, stage_of
from appliance.keeper.settings import Slot
from appliance.record import Flag
from appliance.tensors.comparison import differences
from appliance.tensors.flags import flags_of
from appliance.tensors.homes import Stage
from appliance.tensors.inventory import TensorError
from appliance.verdict import Outcome
from tests.handover.obtaining import obtained
from tests.keeper.serving import Serving

CONFIGS = {"config.json": b"{}"}


class Kernel:
    """What computes with a weight. It lays it out once, and notes that, and its width."""

    def __init__(self) -> None:
        self.width: int | None = None
        self.is_done = False


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
        self.kernel: Kernel | None = Kernel()


class Table:
    """What is made of a processed weight in each process: it holds that, and one of its own."""

    def __init__(self, layer: Layer) -> None:
        self.weight = layer.weight
        self.doubled = layer.weight.data * 2


class Made:
    """A source of one layer; `again` is what it does to one that has the processed weights."""

    role: Final = "target"
    rank: Final = 0
    device: Final = "cpu"
    stages: tuple[Stage, ...] = STAGES
    opaque: Collection[type] = ()
    unused: Collection[str] = ()

    def __init__(self, again: Callable[[Layer], object] = lambda layer: None, *, tables: bool = False) -> None:
        self._again = again
        self._tables = tables
        self.loaded: list[Stage] = []

    def facts(self, configs: Mapping[str, bytes]) -> Mapping[str, object]:
        return {}

    def skeleton(self, configs: Mapping[str, bytes]) -> nn.Module:
        return Layer().to("meta")

    def load(self, stage: Stage, on_progress: Callable[[str], None]) -> Loaded:
        self.loaded.append(stage)
        layer = Layer()
        if stage == "processed":
            self._process(layer)
        flags = flags_of(layer, self.skeleton({}), inner=stage == "processed")
        return Loaded(layer, dict(CONFIGS), {}, {}, flags)

    def finish(self, module: nn.Module, stage: Stage) -> nn.Module:
        assert isinstance(module, Layer)
        if stage == "loaded":
            self._process(module)
        else:
            self._again(module)
        return module

    def _process(self, layer: Layer) -> None:
        assert layer.kernel is not None
        assert not layer.kernel.is_done
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.kernel.width, layer.kernel.is_done = 2, True
        if self._tables:
            _rebuilt(layer)


def _rebuilt(layer: Layer) -> None:
    layer.table = Table(layer)  # type: ignore[assignment]


def _rebuilt_otherwise(layer: Layer) -> None:
    _rebuilt(layer)
    layer.table.doubled += 1  # type: ignore[operator, union-attr]


def _asked_whether_it_is_done(layer: Layer) -> None:
    # It would leave out the rest of its work.
    assert layer.kernel is not None
    assert not layer.kernel.is_done


def _renewed(layer: Layer) -> None:
    layer.kernel = Kernel()


def _widened(layer: Layer) -> None:
    layer.extra = "of this process alone"  # type: ignore[assignment]


def _removed(layer: Layer) -> None:
    layer.kernel = None


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, layout=[Slot("target", 0, "cpu")]) as serving:
        yield serving


def close(serving: Serving, *all_weights: Weights) -> None:
    """End the leases; the keeper has said so when this returns."""
    for weights in all_weights:
        assert weights.client is not None
        weights.client.close()
    serving.wait_until(lambda: not serving.holdings.leases)


@pytest.mark.parametrize("again", [_asked_whether_it_is_done, _renewed])
def test_what_is_proved_is_kept_processed_and_is_the_same_to_who_attaches(
    serving: Serving, again: Callable[[Layer], object]
) -> None:
    source = Made(again)
    donated, attached = obtained(serving, source), obtained(serving, Made(again))
    assert (donated.verdict.outcome, attached.verdict.outcome) == (Outcome.DONATED, Outcome.HIT)
    assert (stage_of(attached.record), source.loaded) == ("processed", ["processed"])
    assert differences(donated.module, attached.module) == []
    layer: Any = attached.module
    assert (layer.kernel.width, layer.weight.shape) == (2, (3, 2))
    close(serving, donated, attached)


@pytest.mark.parametrize("again", [_widened, _removed])
def test_what_is_not_proved_is_kept_as_loaded_and_says_why(
    serving: Serving, again: Callable[[Layer], object], capfd: pytest.CaptureFixture[str]
) -> None:
    source = Made(again)
    donated = obtained(serving, source)
    assert source.loaded == ["processed", "loaded"]
    said = capfd.readouterr().err
    assert "not kept as processed" in said
    assert {"_widened": "extra", "_removed": "kernel"}[again.__name__] in said
    attached = obtained(serving, Made(again))
    assert (attached.verdict.outcome, stage_of(attached.record)) == (Outcome.HIT, "loaded")
    assert differences(donated.module, attached.module) == []
    layer: Any = attached.module
    assert layer.weight.shape == (3, 2)
    close(serving, donated, attached)


class Left(Made):
    """A source whose keeper goes away while its skeleton is built: the descriptors are there, the report is not."""

    def __init__(self, serving: Serving) -> None:
        super().__init__()
        self._serving = serving

    def skeleton(self, configs: Mapping[str, bytes]) -> nn.Module:
        self._serving.close()
        return super().skeleton(configs)


def test_a_keeper_that_goes_away_in_the_middle_of_an_attach_costs_its_engine_nothing(serving: Serving) -> None:
    donated = obtained(serving, Made())
    attached = obtained(serving, Left(serving))
    assert not serving.alive
    assert attached.verdict.outcome is Outcome.HIT
    assert differences(donated.module, attached.module) == []
    assert attached.client is not None, "whose lease is renewed"
    assert attached.client.wait_for_hangup() is None
    for weights in (donated, attached):
        assert weights.client is not None
        weights.client.close()


class Elsewhere(Made):
    """A source whose weights, as loaded, bring along what no module of it can have."""

    stages: tuple[Stage, ...] = ("loaded",)

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def load(self, stage: Stage, on_progress: Callable[[str], None]) -> Loaded:
        return dataclasses.replace(super().load(stage, on_progress), flags=(Flag(self.place, "seen", True),))


@pytest.mark.parametrize("place", ["elsewhere", "weight", "kernel"])
def test_what_has_no_place_beside_loaded_weights_is_refused(serving: Serving, place: str) -> None:
    with pytest.raises(PeerError, match=f"'{place}', which this module has not"):
        obtained(serving, Elsewhere(place))


def test_objects_that_are_rebuilt_with_tensors_of_their_own_are_so_where_they_are_attached(serving: Serving) -> None:
    source = Made(_rebuilt, tables=True)
    donated, attached = obtained(serving, source), obtained(serving, Made(_rebuilt, tables=True))
    assert (stage_of(attached.record), source.loaded) == ("processed", ["processed"])
    assert differences(donated.module, attached.module) == []
    layer: Any = attached.module
    assert layer.table.weight is layer.weight
    close(serving, donated, attached)


@pytest.mark.parametrize("again", [_rebuilt_otherwise, _asked_whether_it_is_done])
def test_objects_that_are_rebuilt_otherwise_or_not_at_all_are_not_attached(
    serving: Serving, again: Callable[[Layer], object], capfd: pytest.CaptureFixture[str]
) -> None:
    source = Made(again, tables=True)
    close(serving, obtained(serving, source))
    assert source.loaded == ["processed", "loaded"]
    assert "table.doubled" in capfd.readouterr().err


def test_an_engine_that_rebuilds_otherwise_than_the_donor_does_not_start(serving: Serving) -> None:
    close(serving, obtained(serving, Made(_rebuilt, tables=True)))
    with pytest.raises(TensorError, match=r"table\.doubled of the shard are not what this process makes of it"):
        obtained(serving, Made(_rebuilt_otherwise, tables=True))
