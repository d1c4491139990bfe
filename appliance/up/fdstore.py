"""The descriptors that one unit has handed to its service manager: kept while it is gone, as PID 1 keeps them.

https://systemd.io/FILE_DESCRIPTOR_STORE, with FileDescriptorStorePreserve=restart.
"""

import asyncio
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.descriptors import Descriptor, close_all
from appliance.up.message import DEFAULT_NAME
from appliance.up.same_file import same_file


@dataclass(frozen=True)
class Stored:
    """One descriptor and the name it will come back under."""

    name: str
    descriptor: Descriptor
    inode: tuple[int, int]
    polled: bool


class DescriptorStore:
    """Owns what is stored, at most `limit` descriptors. `say` is told in one line what was refused or dropped."""

    def __init__(self, *, limit: int, say: Callable[[str], None]) -> None:
        self._limit = limit
        self._say = say
        self._stored: list[Stored] = []  # newest first, the order in which PID 1 hands them over
        self._hang_ups: select.epoll | None = None

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, descriptors: Sequence[Descriptor], *, name: str | None = None, poll: bool = True) -> int:
        """Take these over under one name and return how many are new here; the others are closed.

        A descriptor that is in the store already is not stored twice, whatever its name. With `poll`, one whose other
        end hangs up is dropped.
        """
        added = 0
        for index, descriptor in enumerate(descriptors):
            if len(self._stored) >= self._limit:
                close_all(descriptors[index:])
                refused = len(descriptors) - index
                self._say(f"the descriptor store is full with {self._limit}: {refused} more not kept")
                break
            added += self._add(descriptor, DEFAULT_NAME if name is None else name, poll=poll)
        return added

    def remove(self, name: str) -> int:
        """Close all of this name and return how many there were."""
        doomed = [stored for stored in self._stored if stored.name == name]
        self._stored = [stored for stored in self._stored if stored.name != name]
        for stored in doomed:
            self._close(stored)
        return len(doomed)

    def clear(self) -> int:
        """Close all and return how many there were: the unit is stopped, its memory is wanted back."""
        doomed, self._stored = self._stored, []
        for stored in doomed:
            self._close(stored)
        if self._hang_ups is not None:
            asyncio.get_running_loop().remove_reader(self._hang_ups.fileno())
            self._hang_ups.close()
            self._hang_ups = None
        return len(doomed)

    def kept(self) -> list[tuple[str, int]]:
        """Return names and numbers, newest first; the numbers stay owned here."""
        return [(stored.name, stored.descriptor.fileno()) for stored in self._stored]

    def _add(self, descriptor: Descriptor, name: str, *, poll: bool) -> bool:
        fd = descriptor.fileno()
        status = os.fstat(fd)
        inode = status.st_dev, status.st_ino
        # Only equal inodes can be one open file, and 200 slabs compared in pairs would be 20,000 system calls.
        if any(stored.inode == inode and same_file(stored.descriptor.fileno(), fd) for stored in self._stored):
            descriptor.close()
            return False
        polled = poll and self._watch(fd)
        self._stored.insert(0, Stored(name, descriptor, inode, polled))
        return True

    def _watch(self, fd: int) -> bool:
        if self._hang_ups is None:
            self._hang_ups = select.epoll()
            asyncio.get_running_loop().add_reader(self._hang_ups.fileno(), self._drop_hung_up)
        try:
            self._hang_ups.register(fd, 0)  # hang-up and error are always reported, and data never is
        except PermissionError:  # a file or a memfd: nothing to poll
            return False
        return True

    def _drop_hung_up(self) -> None:
        assert self._hang_ups is not None  # noqa: S101
        gone = {fd for fd, _ in self._hang_ups.poll(0)}
        doomed = [stored for stored in self._stored if stored.descriptor.fileno() in gone]
        self._stored = [stored for stored in self._stored if stored not in doomed]
        for stored in doomed:
            self._close(stored)
            self._say(f"the other end of stored descriptor {stored.name!r} hung up: dropped")

    def _close(self, stored: Stored) -> None:
        # The file stays open elsewhere, and epoll would go on reporting it under a number that is used again.
        if stored.polled and self._hang_ups is not None:
            self._hang_ups.unregister(stored.descriptor.fileno())
        stored.descriptor.close()
