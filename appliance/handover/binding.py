"""A shard's slabs become the tensors of a module: one thread maps them while another reads the layout.

Mapping is the driver's work, tens of milliseconds for a full GPU, and reading the layout and finding a place for each
tensor is Python's; neither needs the other.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from appliance import collector
from appliance import layout as layouts
from appliance.descriptors import Descriptor
from appliance.errors import ResourceError
from appliance.slabs.interface import Backend, Mapping
from appliance.tensors.attachment import Awaited, place
from appliance.tensors.homes import Stage

# Python's own 5 ms, before a thread that comes back from a call may go on, would cost more than mapping a slab.
TURN_S = 1e-4


def bind(
    module: torch.nn.Module,
    layout: bytes,
    device: Backend,
    slabs: Sequence[Descriptor],
    slab_sizes: Sequence[int],
    *,
    copy: bool = False,
    stage: Stage = "loaded",
    opaque: Collection[type] = (),
) -> Awaited:
    """Give a skeleton the tensors of a shard; refuses what `layouts.decode`, `place`, `map_all` and `bind` refuse.

    ResourceError also where this process may have no more threads. Return what of processed weights is to be confirmed
    once the module is finished. The descriptors stay the caller's. Tensors keep what they lie in mapped; after an error
    nothing is.
    """
    with collector.paused(), _mapped_meanwhile(device, slabs, slab_sizes) as mappings:
        placement = place(module, layouts.decode(layout), stage=stage, rebuilds=True, opaque=opaque)
        return placement.bind(mappings(), copy=copy)


@contextlib.contextmanager
def _mapped_meanwhile(
    device: Backend, slabs: Sequence[Descriptor], slab_sizes: Sequence[int]
) -> Iterator[Callable[[], Sequence[Mapping]]]:
    """Map a shard in a thread while the block runs; yields what waits for it. After the block only tensors hold it."""
    with _short_turns(), ThreadPoolExecutor(1) as pool:
        mapping = _begun(pool, device, slabs, slab_sizes)
        try:
            yield mapping.result
        finally:
            if mapping.exception() is None:
                for mapped in mapping.result():
                    mapped.close()


def _begun(
    pool: ThreadPoolExecutor, device: Backend, slabs: Sequence[Descriptor], slab_sizes: Sequence[int]
) -> "Future[list[Mapping]]":
    try:
        return pool.submit(device.map_all, slabs, slab_sizes)
    except RuntimeError as error:
        raise ResourceError(
            f"no thread to map slabs with: {error}",
            hint="raise TasksMax= of the unit, or the user's limit of processes",
        ) from error


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    if before <= TURN_S:
        # Of this process or of another bind of it: who made them short ends that, and nobody else.
        yield
        return
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
