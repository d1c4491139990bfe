"""What a unit is told to be, and what it says of itself while it runs. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class UnitDescription:
    """A program to keep running; the settings mean what systemd's of the same sense mean.

    `needs` are units that must be ready before this one starts and that take it with them when they are stopped. One
    that dies or is restarted leaves it alone.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    start_timeout_s: float = 90.0
    stop_timeout_s: float = 90.0
    watchdog_s: float | None = None
    store_limit: int = 0
    notify_access: Literal["main", "all"] = "main"
    first_restart_s: float = 0.1
    slowest_restart_s: float = 30.0
    ran_well_s: float = 10.0


@dataclass(frozen=True)
class Checkpoint:
    """A model's signed checkpoint, and the draft's, which may be replaced while they are served.

    `directories` are their folders; `verify` is a program that exits with status 0 and prints a JSON object, without a
    `refusal` in it, if all of it is as signed. `restart` are the units that then start anew, one after another.
    """

    model: str
    directories: tuple[Path, ...]
    verify: tuple[str, ...]
    restart: tuple[str, ...]


class State(StrEnum):
    """systemd's states of a unit; a unit that waits for what it needs is inactive."""

    INACTIVE = "inactive"
    ACTIVATING = "activating"
    ACTIVE = "active"
    DEACTIVATING = "deactivating"
    FAILED = "failed"
    AUTO_RESTART = "auto-restart"


class Result(StrEnum):
    """How the last run of a unit ended, in systemd's words where it has one."""

    SUCCESS = "success"
    EXIT_CODE = "exit-code"
    SIGNAL = "signal"
    TIMEOUT = "timeout"
    WATCHDOG = "watchdog"
    PROTOCOL = "protocol"
    RESOURCES = "resources"


@dataclass(frozen=True)
class UnitStatus:
    """One look at a unit. `exit_status` is of its last run, negative for a signal; `said` is the last it told."""

    name: str
    state: State
    result: Result
    pid: int | None
    text: str
    said: str
    starts: int
    exit_status: int | None
    stored: int


class Kind(StrEnum):
    """What an event tells of."""

    STATE = "state"
    STATUS = "status"
    STORE = "store"
    REFUSED = "refused"
    RENEWAL = "renewal"


@dataclass(frozen=True)
class Event:
    """Something happened to a unit (or, for a renewal, to a model); `serious` ones want an operator's eye."""

    unit: str
    kind: Kind
    text: str
    state: State | None = None
    serious: bool = False
