"""One file of a checkpoint, read once from its beginning to its end and hashed from the memory it was read into."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from appliance.checkpoint.files import CheckpointRoot, open_file
from appliance.checkpoint.os_refusal import os_refusal
from appliance.checkpoint.stat_record import FileStat
from appliance.descriptors import Descriptor
from appliance.errors import TrustError

_IOV_MAX = 1024
# What a read that must not wait can fail with: nothing cached, or no such reads on this file system or kernel.
_CANNOT_SAY = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

Piece = list[memoryview]


class Hasher(Protocol):
    """What hashlib's and blake3's objects have in common."""

    def update(self, data: memoryview | bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


def make_hasher(algorithm: str, *, threads: int = 1) -> Hasher:
    """Return a fresh hasher; `threads` is how many BLAKE3 may use for one file."""
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm == "blake3":
        from blake3 import blake3

        hasher: Hasher = blake3(max_threads=threads)
        return hasher
    raise ValueError(f"unknown digest algorithm {algorithm!r}")


@dataclass(frozen=True)
class Hashed:
    """The hex digest of a file's bytes, and its stat, the same before and after they were read."""

    digest: str
    stat: FileStat


class FileStream:
    """One file on its way through, from `open` to `finish`. `destination` says where its bytes go, in order.

    Without a destination they go to scratch memory. TrustError, naming the file, when it changes on the way or, with
    `expected`, has another digest. Owns a descriptor: `close` it, also after an error.
    """

    def __init__(
        self, root: CheckpointRoot, path: str, *, size_bytes: int, hasher: Hasher, expected: str | None
    ) -> None:
        self.root = root
        self.path = path
        self.size_bytes = size_bytes
        self.position = 0
        self.destination: Iterator[Piece] | None = None
        self.on_hashed: Callable[[], None] | None = None
        self.outcome: Hashed | None = None
        self._hasher = hasher
        self._expected = expected
        self._opened: tuple[Descriptor, FileStat] | None = None

    def open(self) -> None:
        """Open it and take its stat, unless that is done."""
        if self.is_open:
            return
        descriptor = open_file(self.root, self.path)
        try:
            before = FileStat.of(os.fstat(descriptor.fileno()))
            os.posix_fadvise(descriptor.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            descriptor.close()
            raise os_refusal(error, f"look at {self.root.path / self.path}") from error
        self._opened = descriptor, before
        if before.size_bytes != self.size_bytes:
            raise self._refusal("changed size while the checkpoint was read")

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    def fileno(self) -> int:
        """Return the open file's descriptor; it stays owned here."""
        return self._open_now()[0].fileno()

    def skip(self, data: bytes) -> None:
        """Take bytes that were read from the file's beginning into the digest, and go on after them."""
        self._hasher.update(data)
        self.position = len(data)

    def read(self, piece: Piece, *, wait: bool = True) -> Piece:
        """Fill the piece with the file's next bytes; TrustError where the file ends before they do.

        Without `wait`, what is not in the page cache stays unread: returns the part of the piece that is still to fill.
        """
        descriptor, _ = self._open_now()
        rest = [view for view in piece if view.nbytes]
        while rest:
            try:
                count = os.preadv(descriptor.fileno(), rest[:_IOV_MAX], self.position, 0 if wait else os.RWF_NOWAIT)
            except OSError as error:
                if not wait and error.errno in _CANNOT_SAY:
                    break
                raise os_refusal(error, f"read {self.root.path / self.path}") from error
            if count == 0 and not wait:
                break
            if count == 0:
                raise self._refusal("was cut short while it was read")
            self.position += count
            rest = _beyond(rest, count)
        return rest

    def hash(self, piece: Piece) -> None:
        """Take the piece into the digest, then tell `on_hashed`. Pieces come in the order they were read in."""
        for view in piece:
            self._hasher.update(view)
        if piece and self.on_hashed is not None:
            self.on_hashed()

    def hash_cached(self, scratch: memoryview, *, limit_bytes: int) -> int:
        """Read and hash what is in the page cache from here on, up to the limit; return how many bytes that was.

        What a core reads it finds in its own cache when it hashes it, if the scratch memory is small enough.
        """
        descriptor, _ = self._open_now()
        # Little happens between two parts: on a busy core it costs more than it seems.
        fd, update, begin, flags = descriptor.fileno(), self._hasher.update, self.position, os.RWF_NOWAIT
        end = begin + limit_bytes
        while self.position < end:
            part = scratch[: end - self.position]
            try:
                count = os.preadv(fd, [part], self.position, flags)
            except OSError as error:
                if error.errno in _CANNOT_SAY:
                    break
                raise os_refusal(error, f"read {self.root.path / self.path}") from error
            if count == 0:
                break
            update(part[:count])
            self.position += count
        return self.position - begin

    def finish(self) -> None:
        """Check that the file is still as it was, settle its digest, check that too, and close."""
        descriptor, before = self._open_now()
        try:
            differing = before.differing(FileStat.of(os.fstat(descriptor.fileno())))
        except OSError as error:
            raise os_refusal(error, f"look at {self.root.path / self.path}") from error
        finally:
            self.close()
        if differing:
            raise self._refusal(f"changed while it was read ({', '.join(differing)})")
        digest = self._hasher.hexdigest()
        if self._expected is not None and digest != self._expected:
            raise TrustError(
                f"checkpoint {self.root}: {self.path} is not the file that was signed or pinned: "
                f"its digest is {digest[:16]}..., not {self._expected[:16]}...",
                hint="put the right file back or, if the change is wanted, have the checkpoint signed or pinned again",
            )
        self.outcome = Hashed(digest, before)

    def close(self) -> None:
        """Give the descriptor back, if there is one."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()

    def _open_now(self) -> tuple[Descriptor, FileStat]:
        if self._opened is None:
            raise ValueError(f"{self.path}: not open")
        return self._opened

    def _refusal(self, what: str) -> TrustError:
        hint = "try again when nothing writes to the checkpoint any more"
        return TrustError(f"checkpoint {self.root}: {self.path} {what}", hint=hint)


def _beyond(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []
