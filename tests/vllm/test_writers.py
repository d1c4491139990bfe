"""An RPC that would write to attached weights is refused by the worker; one to other weights does what it did."""

from typing import Any

import pytest

from appliance.errors import ConfigError
from appliance.vllm.writers import WRITERS, class_of, guard


class Worker:
    """What vLLM's worker has of methods that write, as far as they are called here, and one that does not."""

    def __init__(self, *, attached: bool) -> None:
        self.attached = attached
        self.did: list[Any] = []

    def reset_weights(self) -> None:
        self.did.append("reset")

    def reload_weights(self, *arguments: Any, **options: Any) -> None:
        self.did.append(("reload", arguments, options))

    def sleep(self, level: int = 1) -> None:
        self.did.append(("sleep", level))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.did.append(("load", load_dummy_weights))

    def compute_weight_checksums(self) -> str:
        return "read"


class OfCpu(Worker):
    """One that has its own way to sleep."""

    def sleep(self, level: int = 1) -> None:
        self.did.append(("ignored", level))


@pytest.fixture
def kind() -> type[OfCpu]:
    kind = type("Own", (OfCpu,), {})
    # As for each engine of a process, one after the other.
    for _ in range(2):
        guard(kind, is_attached=lambda worker: worker.attached)
    return kind


WRITING: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("reset_weights", (), {}),
    ("reload_weights", (), {}),
    ("reload_weights", (), {"weights_iterator": [], "is_checkpoint_format": False}),
    ("sleep", (2,), {}),
    ("sleep", (), {"level": "2"}),  # as what /collective_rpc is given as text
    ("load_model", (), {"load_dummy_weights": True}),
]
READING: list[tuple[str, dict[str, Any], Any]] = [
    ("sleep", {}, ("ignored", 1)),
    ("sleep", {"level": 1}, ("ignored", 1)),
    ("load_model", {}, ("load", False)),
]


@pytest.mark.parametrize(("method", "arguments", "options"), WRITING)
def test_what_would_write_to_attached_weights_is_refused_with_its_name(
    kind: type[OfCpu], method: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    worker = kind(attached=True)
    with pytest.raises(ConfigError, match=f"^{method}: attached weights are shared and read-only"):
        getattr(worker, method)(*arguments, **options)
    assert worker.did == []


@pytest.mark.parametrize(("method", "arguments", "options"), WRITING)
def test_a_worker_whose_weights_are_its_own_does_what_it_is_asked(
    kind: type[OfCpu], method: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    worker = kind(attached=False)
    getattr(worker, method)(*arguments, **options)
    assert len(worker.did) == 1


@pytest.mark.parametrize(("method", "options", "did"), READING)
def test_what_leaves_the_weights_alone_is_not_refused(
    kind: type[OfCpu], method: str, options: dict[str, Any], did: Any
) -> None:
    worker = kind(attached=True)
    getattr(worker, method)(**options)
    assert worker.did == [did]
    assert worker.compute_weight_checksums() == "read"


def test_a_method_that_this_vllm_has_not_is_not_made_up(kind: type[OfCpu]) -> None:
    assert "elastic_ep_execute" in WRITERS
    assert not hasattr(kind, "elastic_ep_execute")


def test_a_worker_is_found_by_the_name_that_vllm_has_for_it() -> None:
    assert class_of(f"{__name__}.OfCpu") is OfCpu
