"""A blocking client of one keeper. The open connection is the lease: close it only when nothing is mapped any more."""

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from appliance import memfd, record, wire
from appliance.descriptors import Descriptor, close_all
from appliance.errors import ConfigError, PeerError, ResourceError
from appliance.fingerprint import Difference, Fingerprint
from appliance.record import ShardRecord
from appliance.verdict import Reason, Verdict, refused

REPLY_TIMEOUT_S = 30.0
CROWD_TIMEOUT_S = 5.0
RETRY_S = 0.05
MAX_SOCKET_PATH_BYTES = 107  # sun_path, less its NUL

Reply = TypeVar("Reply", bound=wire.Message)


class RefusedError(PeerError):
    """The keeper said no; `verdict` says why. The caller decides whose fault that is."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


@dataclass(frozen=True)
class Description:
    """A resident shard's record, the raw record behind it, and its configs. The caller closes `configs`."""

    record: ShardRecord
    layout: bytes
    configs: Descriptor


class KeeperClient:
    """One connection to a keeper's socket; a context manager."""

    def __init__(self, channel: socket.socket, path: Path) -> None:
        self._channel = channel
        self._path = path
        # Said while we asked for something else; wait_for_hangup tells.
        self._leave: str | None = None
        self._described: dict[tuple[str, int], str] = {}

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float = 0.0) -> "KeeperClient":
        """Connect, waiting for the socket to appear; ResourceError where no keeper answers in time."""
        if len(bytes(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{path}: {len(bytes(path))} bytes, a Unix socket's path has at most {MAX_SOCKET_PATH_BYTES}",
                hint="set a shorter directories.runtime",
            )
        began = time.monotonic()
        while True:
            channel = _channel()
            try:
                channel.connect(str(path))
                return cls(channel, path)
            except OSError as error:
                channel.close()
                if isinstance(error, PermissionError):
                    raise ConfigError(f"{path}: not permitted to connect", hint=_way_in()) from error
                if error.errno == errno.EPROTOTYPE:
                    raise ConfigError(
                        f"{path} is the socket of another program", hint="a keeper's is RUNTIME/MODEL/keeper.sock"
                    ) from error
                # A keeper is there, and others are before us at its door.
                crowded = isinstance(error, BlockingIOError)
                if time.monotonic() - began >= (max(timeout_s, CROWD_TIMEOUT_S) if crowded else timeout_s):
                    raise ResourceError(
                        f"no keeper answers at {path}: {error.strerror or error}",
                        # The socket's folder has the model's name.
                        hint=f"is weights@{path.parent.name} running? For a container: is that folder mounted into it?",
                    ) from error
            time.sleep(RETRY_S)

    def status(self) -> dict[str, Any]:
        """Return what the keeper says of itself."""
        return self._ask(wire.Status(), wire.StatusReply).status

    def describe(
        self, *, role: str, rank: int, wait_s: float, on_progress: Callable[[str], None] = lambda text: None
    ) -> Description:
        """Return a shard's record, layout and configs once it is resident; RefusedError after `wait_s` seconds."""
        asked = wire.Describe(role=role, rank=rank, wait_s=wait_s)
        packet = self._exchange(asked, wire.Described, wait_s=wait_s, on_progress=on_progress)
        held, configs = packet.descriptors
        try:
            with held:
                data = memfd.read(held, what="shard record", limit_bytes=record.MAX_RECORD_BYTES)
            description = Description(record.decode_header(data), record.layout_bytes(data), configs)
        except BaseException:
            configs.close()
            raise
        self._described[role, rank] = description.record.shard_id
        return description

    def attach(self, *, role: str, rank: int, client: str, fingerprint: Fingerprint) -> tuple[Descriptor, ...]:
        """Return the slabs of the shard with exactly this fingerprint; RefusedError with the facts that differ.

        ResourceError where another shard took the place of the one described over this connection: its layout may
        differ. The caller closes the slabs; the lease stays with this connection.
        """
        asked = wire.Attach(role=role, rank=rank, client=client, fingerprint=fingerprint.to_json())
        packet = self._exchange(asked, wire.Attached)
        attached = cast(wire.Attached, packet.message).shard_id
        if self._described.get((role, rank), attached) != attached:
            packet.close()
            raise ResourceError(f"{role} rank {rank} was replaced since it was described", hint="try again")
        return packet.descriptors

    def renew(self, *, shard_id: str, client: str) -> None:
        """Make this connection the lease of a shard that was attached over an earlier one."""
        self._ask(wire.Renew(shard_id=shard_id, client=client), wire.Renewed)

    def offer(self, *, role: str, rank: int, client: str, target: Fingerprint, replace: bool = False) -> None:
        """Ask to fill a slot; RefusedError while somebody else does, or it is filled."""
        asked = wire.Offer(role=role, rank=rank, client=client, target=target.to_json(), replace=replace)
        self._ask(asked, wire.Granted)

    def progress(self, text: str) -> None:
        """Tell how far the load is; a keeper that went away is noticed by the donation."""
        with contextlib.suppress(OSError):
            self._channel.settimeout(REPLY_TIMEOUT_S)
            wire.send(self._channel, wire.Progress(text=text[:200]))

    def donate(self, held: Descriptor, configs: Descriptor, slabs: Sequence[Descriptor]) -> None:
        """Hand a shard over; returns once the service manager holds it too. The descriptors stay the caller's."""
        self._exchange(wire.Donate(), wire.Donated, descriptors=[held, configs, *slabs])

    def report(self, verdict: Verdict, phases_s: dict[str, float]) -> None:
        """Tell the keeper how an attach ended in this process, for its status and metrics."""
        reason = "" if verdict.reason is None else str(verdict.reason)
        message = wire.Report(
            verdict=str(verdict.outcome), reason=reason, detail=verdict.detail[:2000], phases_s=phases_s
        )
        with self._connection_errors():
            self._channel.settimeout(REPLY_TIMEOUT_S)
            wire.send(self._channel, message)

    def scrubbed(self, *, shard_id: str, damaged: Sequence[int]) -> None:
        """Tell which slabs of a shard, attached over this connection, are not what was donated; none is good news."""
        self._ask(wire.Scrubbed(shard_id=shard_id, damaged=list(damaged)), wire.Noted)

    def checkpoint_seen(self, refusal: str) -> None:
        """Tell the keeper why the checkpoint on disk is refused; an empty text says that it is the resident one."""
        self._ask(wire.CheckpointSeen(refusal=refusal[:2000]), wire.Noted)

    def evict(self, *, force: bool) -> int:
        """Have every shard freed and return the bytes; RefusedError while one is leased, unless forced."""
        return self._ask(wire.Evict(force=force), wire.Evicted).size_bytes

    def wait_for_hangup(self) -> str | None:
        """Block until the keeper goes away or closes the lease, and return None; or until it wants our end, and why."""
        if self._leave is not None:
            why, self._leave = self._leave, None
            return why
        with contextlib.suppress(OSError, PeerError):
            while True:
                self._channel.settimeout(None)
                try:
                    packet = wire.receive(self._channel)
                except TimeoutError:  # set by another thread, which reports over this connection
                    continue
                if packet is None:
                    return None
                packet.close()
                if isinstance(packet.message, wire.Leave):
                    return packet.message.detail
        return None

    def close(self) -> None:
        # Wakes a thread in wait_for_hangup, which a plain close would leave asleep.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()

    def __enter__(self) -> "KeeperClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, asked: wire.Message, expected: type[Reply]) -> Reply:
        return cast(Reply, self._exchange(asked, expected).message)

    def _exchange(
        self,
        asked: wire.Message,
        expected: type[wire.Message],
        *,
        descriptors: Sequence[Descriptor] = (),
        wait_s: float = 0.0,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> wire.Packet:
        deadline = time.monotonic() + wait_s + REPLY_TIMEOUT_S
        with self._connection_errors():
            self._send(asked, descriptors)
            while True:
                self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
                packet = self._receive()
                if packet is None:
                    raise PeerError(f"the keeper at {self._path} closed the connection")
                if isinstance(packet.message, wire.Progress):
                    on_progress(packet.message.text)
                    continue
                if isinstance(packet.message, wire.Leave):
                    self._leave = packet.message.detail
                    continue
                if isinstance(packet.message, expected):
                    return packet
                close_all(packet.descriptors)
                if isinstance(packet.message, wire.Refused):
                    raise RefusedError(self._verdict(packet.message))
                raise PeerError(f"the keeper at {self._path} answered {asked.op!r} with {packet.message.op!r}")

    def _send(self, message: wire.Message, descriptors: Sequence[Descriptor]) -> None:
        self._channel.settimeout(REPLY_TIMEOUT_S)
        # Who closed the connection may have said why before: that is still there to be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.send(self._channel, message, descriptors)

    def _receive(self) -> wire.Packet | None:
        try:
            try:
                return wire.receive(self._channel)
            except ConnectionResetError:
                # Reported once, ahead of what was received, where the keeper closed without having read all of ours.
                return wire.receive(self._channel)
        except PeerError as error:
            raise PeerError(f"the keeper at {self._path}: {error.message}") from error

    def _verdict(self, message: wire.Refused) -> Verdict:
        try:
            fields = tuple(Difference(*field) for field in message.fields)
            return refused(Reason(message.reason), message.detail, fields=fields)
        except (TypeError, ValueError) as error:
            reason = message.reason[:40]
            raise PeerError(f"the keeper at {self._path} refused with an unknown reason {reason!r}") from error

    @contextlib.contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise PeerError(f"the keeper at {self._path} does not answer") from error
        except OSError as error:
            raise PeerError(f"lost the keeper at {self._path}: {error.strerror or error}") from error


def resident_fingerprint(path: Path) -> Fingerprint:
    """Return what the keeper at this socket holds for the model's first rank; RefusedError where that is nothing."""
    with KeeperClient.connect(path) as client:
        described = client.describe(role="target", rank=0, wait_s=0)
    described.configs.close()
    return described.record.fingerprint


def _way_in() -> str:
    """Return what to set for this process to be in the keeper's group."""
    whole = ["0", "0", str(2**32 - 1)]
    if Path("/proc/self/gid_map").read_text().split() == whole:
        return "join the appliance's group; for a container: --group-add with the group's number on the host"
    # Groups that a user namespace does not map cannot be told apart from inside.
    return (
        "a user namespace is in between: rootless Podman wants its user in the appliance's group and "
        "--group-add=keep-groups, --userns=auto wants :gidmapping=GID:GID:1 and --group-add=GID, the group's number on "
        "the host"
    )


def _channel() -> socket.socket:
    try:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ResourceError(f"cannot make a socket: {error.strerror}") from error
    channel.settimeout(REPLY_TIMEOUT_S)
    return channel
