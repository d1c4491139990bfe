"""A service manager's end of NOTIFY_SOCKET for tests: keeps descriptors as PID 1 does, and is stricter than PID 1.

What PID 1 would drop without a word fails the test at `close`.
"""

import os
import random
import re
import socket
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from appliance.descriptors import Descriptor, close_all
from appliance.notify import Named
from tests.descriptors import identity

MAX_DATAGRAM_BYTES = 4096
WAIT_TIMEOUT_S = 60.0

_KNOWN = {"READY", "STATUS", "STOPPING", "WATCHDOG", "EXTEND_TIMEOUT_USEC", "FDSTORE", "FDSTOREREMOVE", "FDNAME"}
_KNOWN |= {"FDPOLL", "BARRIER"}
_NAME = re.compile(r"[!-9;-~]{1,255}")  # no ':'


@dataclass(frozen=True)
class Datagram:
    """One message as it came, with its own duplicates of the descriptors."""

    lines: tuple[str, ...]
    descriptors: tuple[Descriptor, ...] = ()

    @property
    def values(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.lines)


class Store:
    """A unit's descriptor store: what a sequence of datagrams leaves in it. Owns duplicates."""

    def __init__(self, *, limit: int = 1024) -> None:
        self._limit = limit
        self.stored: list[Named] = []

    def apply(self, datagram: Datagram) -> None:
        values = datagram.values
        if "FDSTOREREMOVE" in values:
            gone = [named for named in self.stored if named.name == values["FDNAME"]]
            self.stored = [named for named in self.stored if named.name != values["FDNAME"]]
            close_all(named.descriptor for named in gone)
        elif "FDSTORE" in values and len(self.stored) < self._limit:
            fd = datagram.descriptors[0].fileno()
            # As PID 1: one open file is kept once, whatever its name.
            if all(identity(named.descriptor.fileno()) != identity(fd) for named in self.stored):
                self.stored.append(Named(values["FDNAME"], Descriptor(os.dup(fd))))

    def names(self) -> list[str]:
        return [named.name for named in self.stored]

    def handed_over(self, *, shuffle: random.Random | None = None) -> list[Named]:
        """Return duplicates, as a new process of the unit would get them. The caller closes them."""
        given = [Named(named.name, Descriptor(os.dup(named.descriptor.fileno()))) for named in reversed(self.stored)]
        if shuffle is not None:
            shuffle.shuffle(given)
        return given

    def close(self) -> None:
        close_all(named.descriptor for named in self.stored)


class ServiceManager:
    """Listens in a thread until closed; `close` raises AssertionError for what PID 1 would not have understood."""

    def __init__(self, folder: Path, *, limit: int = 1024) -> None:
        self.path = folder / "notify.sock"
        self.store = Store(limit=limit)
        self.datagrams: list[Datagram] = []
        self._complaints: list[str] = []
        self._changed = threading.Condition()
        self._paused = threading.Event()
        self._paused.set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(str(self.path))
        self._thread = threading.Thread(target=self._listen, name="service manager")
        self._thread.start()

    @property
    def environ(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": str(self.path)}

    def wait_for(self, condition: Callable[[Self], bool]) -> None:
        """Return once it holds; AssertionError after a while."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), WAIT_TIMEOUT_S), self.said()

    def wait_for_line(self, line: str) -> None:
        self.wait_for(lambda manager: any(line in datagram.lines for datagram in manager.datagrams))

    def heard(self, line: str) -> bool:
        with self._changed:
            return any(line in datagram.lines for datagram in self.datagrams)

    def said(self) -> list[tuple[str, ...]]:
        return [datagram.lines for datagram in self.datagrams]

    def names(self) -> list[str]:
        with self._changed:
            return self.store.names()

    def handed_over(self, *, shuffle: random.Random | None = None) -> list[Named]:
        with self._changed:
            return self.store.handed_over(shuffle=shuffle)

    def pause(self) -> None:
        """Read nothing from now on, as a PID 1 that reloads its units."""
        self._paused.clear()
        _poke(self.path)

    def go_on(self) -> None:
        self._paused.set()

    def close(self) -> None:
        self.go_on()
        _poke(self.path, b"END")
        self._thread.join()
        self._socket.close()
        self.store.close()
        for datagram in self.datagrams:
            close_all(datagram.descriptors)
        assert not self._complaints, self._complaints

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _listen(self) -> None:
        while True:
            data, ancillary, flags, _ = self._socket.recvmsg(
                1 << 16, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC
            )
            fds = [fd for _, _, body in ancillary for fd in array("i", body[: len(body) - len(body) % 4])]
            if data == b"END":
                return
            if data == b"POKE":
                self._paused.wait()
                continue
            with self._changed:
                self._handle(data, tuple(map(Descriptor, fds)), flags)
                self._changed.notify_all()

    def _handle(self, data: bytes, descriptors: tuple[Descriptor, ...], flags: int) -> None:
        datagram = Datagram(tuple(data.decode().split("\n")), descriptors)
        self._complaints += _complaints(data, datagram, flags)
        if datagram.lines == ("BARRIER=1",):
            self.datagrams.append(Datagram(datagram.lines))
            close_all(descriptors)  # the answer: it comes last
            return
        self.store.apply(datagram)
        self.datagrams.append(datagram)


def _complaints(data: bytes, datagram: Datagram, flags: int) -> list[str]:
    values, count = datagram.values, len(datagram.descriptors)
    wrong = {
        "truncated": bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)),
        "too long": len(data) > MAX_DATAGRAM_BYTES,
        "NUL": b"\0" in data,
        "unknown assignment": bool(values.keys() - _KNOWN),
        "assigned twice": len(values) != len(datagram.lines),
        "a barrier with something else": "BARRIER" in values and (len(values) > 1 or count != 1),
        "descriptors with something else than FDSTORE": bool(count) and not values.keys() & {"FDSTORE", "BARRIER"},
        "not one descriptor": "FDSTORE" in values and count != 1,
        "polled": "FDSTORE" in values and values.get("FDPOLL") != "0",
        "stored and removed": {"FDSTORE", "FDSTOREREMOVE"} <= values.keys(),
        "no good name": bool(values.keys() & {"FDSTORE", "FDSTOREREMOVE"})
        and not _NAME.fullmatch(values.get("FDNAME", "")),
    }
    return [f"{what}: {data[:200]!r}" for what, is_so in wrong.items() if is_so]


def _poke(path: Path, data: bytes = b"POKE") -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(data, str(path))


def replayed(datagrams: Sequence[Datagram]) -> Store:
    """Return the store that these datagrams leave behind. The caller closes it."""
    store = Store()
    for datagram in datagrams:
        store.apply(datagram)
    return store
