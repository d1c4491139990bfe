"""Where the tensors of a model lie: in the keeper's memory, or in the engine's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def runner_of(llm: Any) -> Any:
    """Return what computes in an engine of this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def written_and_kept(llm: Any) -> int:
    """Return how many bytes of an engine's parameters and buffers lie in sealed memory; AssertionError if writable."""
    runner = runner_of(llm)
    models = [runner.model, getattr(getattr(runner, "drafter", None), "model", None)]
    sealed = list(_sealed())
    found = 0
    for tensor in {tensor for model in models if model for tensor in (*model.parameters(), *model.buffers())}:
        begin = tensor.untyped_storage().data_ptr()
        if any(first <= begin < last for first, last in sealed):
            found += tensor.nbytes
    return found


def _sealed() -> Iterator[tuple[int, int]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_, name = line.split(maxsplit=5)
        if "memfd:weights-" in name:
            assert "w" not in access, line
            first, last = (int(part, 16) for part in place.split("-"))
            yield first, last
