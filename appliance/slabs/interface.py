"""What a slab backend gives, whether its memory is a sealed memfd or a CUDA VMM allocation.

The one fact to know: a mapping lives until its last window is gone, whoever called `close` before, so a tensor over it
can never read unmapped memory.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

from appliance.descriptors import Descriptor
from appliance.errors import PeerError

# One message of the wire passes at most 253 descriptors; a shard keeps clear of that.
LIMIT_SLABS = 200


class Slab(Protocol):
    """One allocation while its bytes are written. Owns its memory: seal it or close it."""

    @property
    def device(self) -> str:
        """Return the backend's device."""

    @property
    def size_bytes(self) -> int: ...

    def window(self, offset_bytes: int, size_bytes: int) -> object:
        """Return a writable window: a writable buffer in host memory, `__cuda_array_interface__` on a GPU.

        1-d, unsigned bytes. ValueError outside of the slab or after `seal` or `close`.
        """

    def seal(self) -> Descriptor:
        """End writing and return the descriptor that others map. The caller closes it.

        Waits until the device has finished every copy into it. HostError while a window is still alive (a sealed memfd
        may have no writable mapping); nothing is lost then, and the slab is still to be closed.
        """

    def close(self) -> None:
        """Give up what was not sealed. Harmless after `seal`, and when called twice."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Mapping(Protocol):
    """One slab mapped read-only in this process. Owns its mapping, not the descriptor it was made from."""

    @property
    def device(self) -> str:
        """Return the backend's device."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def mapped(self) -> bool:
        """Tell whether the memory is still mapped: after `close` it is, for as long as a window is alive."""

    def window(self, offset_bytes: int, size_bytes: int) -> object:
        """Return a read-only window, as `Slab.window`; it keeps the memory mapped for as long as it lives.

        ValueError outside of the slab or after `close`.
        """

    def close(self) -> None:
        """Give up this hold: unmapped now, or when the last window is gone. Harmless when called twice."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Backend(Protocol):
    """Makes and maps the slabs of one device."""

    @property
    def device(self) -> str:
        """Return "cpu", or the UUID of a GPU."""

    @property
    def granularity_bytes(self) -> int:
        """Return what every slab's size is a multiple of."""

    @property
    def default_slab_bytes(self) -> int:
        """Return the size of slab that suits the device, where `slab_bytes` needs no larger one."""

    def create(self, name: str, size_bytes: int) -> Slab:
        """Return a writable slab with its memory reserved. The caller seals or closes it.

        ResourceError where memory or descriptors are short: nothing stays allocated. ValueError if the size is not a
        positive multiple of the granularity. The name is for diagnosis only.
        """

    def map(self, descriptor: Descriptor, size_bytes: int) -> Mapping:
        """Return the slab behind the descriptor, mapped read-only. The caller closes both, in any order.

        PeerError if it is not a slab of exactly this size on this device that nobody can shrink; ResourceError where
        address space is short.
        """

    def map_all(self, descriptors: Sequence[Descriptor], sizes_bytes: Sequence[int]) -> "list[Mapping]":
        """Return the slabs of a shard in their order, each as `map`; where one is refused, none stays mapped.

        PeerError unless there are as many as there should be.
        """


def mapped_one_by_one(backend: Backend, descriptors: Sequence[Descriptor], sizes_bytes: Sequence[int]) -> list[Mapping]:
    """Return what `Backend.map_all` does, for a backend that gains nothing by seeing all of them at once."""
    if len(descriptors) != len(sizes_bytes):
        raise PeerError(f"{len(descriptors)} slabs instead of the {len(sizes_bytes)} announced")
    with ExitStack() as undo:
        pairs = zip(descriptors, sizes_bytes, strict=True)
        mappings = [undo.enter_context(backend.map(descriptor, size_bytes)) for descriptor, size_bytes in pairs]
        undo.pop_all()
    return mappings


def slab_bytes(backend: Backend, total_bytes: int) -> int:
    """Return the slab size for a shard of this many bytes, such that it needs at most `LIMIT_SLABS` slabs.

    Slabs are filled one after the other, and any two neighbours hold more than one slab size together, so n slabs
    hold more than (n - 1) / 2 slab sizes.
    """
    needed = -(-2 * total_bytes // (LIMIT_SLABS - 1))
    return rounded_up(max(needed, backend.default_slab_bytes), backend.granularity_bytes)


def rounded_up(size_bytes: int, granularity_bytes: int) -> int:
    """Return the smallest multiple of the granularity that is not less than the size."""
    return -(-size_bytes // granularity_bytes) * granularity_bytes
