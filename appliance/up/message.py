"""One datagram of sd_notify(3), read with care: anybody in the unit may have written it."""

from dataclasses import dataclass

from appliance.errors import PeerError
from appliance.lines import printable

# What PID 1 reads at most, and as many descriptors as the kernel passes in one message.
LIMIT_BYTES = 4096
LIMIT_DESCRIPTORS = 253
LIMIT_NAME_BYTES = 255

DEFAULT_NAME = "stored"

_LONGEST_USEC = 2**63 - 1


@dataclass(frozen=True)
class Message:
    """What a process tells its service manager; `ignored` are assignments that could not be understood."""

    ready: bool = False
    reloading: bool = False
    stopping: bool = False
    status: str | None = None
    extend_timeout_s: float | None = None
    watchdog: bool = False
    watchdog_trigger: bool = False
    watchdog_s: float | None = None
    store: bool = False
    remove: bool = False
    name: str | None = None
    poll: bool = True
    barrier: bool = False
    ignored: tuple[str, ...] = ()


def parse(data: bytes) -> Message:
    """Return what the datagram says; PeerError where PID 1 would drop it whole. Unknown assignments mean nothing."""
    if len(data) > LIMIT_BYTES:
        raise PeerError(f"a notification of more than {LIMIT_BYTES} bytes")
    if b"\0" in data.removesuffix(b"\0"):
        raise PeerError("a notification with NUL bytes in it")
    lines = [line for line in data.removesuffix(b"\0").split(b"\n") if line]
    said = frozenset(lines)
    if b"BARRIER=1" in said:
        if len(lines) != 1:
            raise PeerError("a notification with BARRIER=1 and something else")
        return Message(barrier=True)
    ignored: list[str] = []
    return Message(
        ready=b"READY=1" in said,
        reloading=b"RELOADING=1" in said,
        stopping=b"STOPPING=1" in said,
        status=_status(lines, ignored),
        extend_timeout_s=_seconds(b"EXTEND_TIMEOUT_USEC", lines, ignored),
        watchdog=b"WATCHDOG=1" in said,
        watchdog_trigger=b"WATCHDOG=trigger" in said,
        watchdog_s=_seconds(b"WATCHDOG_USEC", lines, ignored),
        store=b"FDSTORE=1" in said and b"FDSTOREREMOVE=1" not in said,
        remove=b"FDSTOREREMOVE=1" in said,
        name=_name(lines, ignored),
        poll=b"FDPOLL=0" not in said,
        ignored=tuple(ignored),
    )


def valid_name(name: bytes) -> bool:
    """Tell whether this may be in LISTEN_FDNAMES, where ':' separates names. The empty name is allowed."""
    return len(name) <= LIMIT_NAME_BYTES and all(0x20 <= byte < 0x7F and byte != ord(":") for byte in name)


def _status(lines: list[bytes], ignored: list[str]) -> str | None:
    value = _first(b"STATUS", lines)
    if value is None:
        return None
    try:
        return printable(value.decode())
    except UnicodeDecodeError:
        ignored.append("STATUS= that is not UTF-8")
        return None


def _seconds(key: bytes, lines: list[bytes], ignored: list[str]) -> float | None:
    value = _first(key, lines)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 20 or int(value) > _LONGEST_USEC:
        ignored.append(f"{key.decode()}= that is no number of microseconds")
        return None
    return int(value) / 1e6


def _name(lines: list[bytes], ignored: list[str]) -> str | None:
    value = _first(b"FDNAME", lines)
    if value is None:
        return None
    if not valid_name(value):
        ignored.append("FDNAME= that is no name of a descriptor")
        return None
    return value.decode("ascii")


def _first(key: bytes, lines: list[bytes]) -> bytes | None:
    start = key + b"="
    return next((line[len(start) :] for line in lines if line.startswith(start)), None)
