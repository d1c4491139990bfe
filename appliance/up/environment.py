"""The environment of what a unit runs: this process's own, less what was meant for this process alone."""

from collections.abc import Mapping
from pathlib import Path

from appliance.up.description import UnitDescription
from appliance.up.group import MARK

# A service manager above us said these to us; and those that we say are said anew to each unit.
_FOREIGN = frozenset(
    {
        *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "MAINPID", "MANAGERPID", "INVOCATION_ID"),
        *("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID", "FDSTORE", "JOURNAL_STREAM"),
        *("SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", MARK),
    }
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what may be passed on to any program."""
    return {name: value for name, value in environ.items() if name not in _FOREIGN}


def unit_environment(
    description: UnitDescription, environ: Mapping[str, str], *, notify_path: Path, mark: str
) -> dict[str, str]:
    """Return a unit's environment, but for what is known only in its process (LISTEN_*, WATCHDOG_PID)."""
    own = inherited(environ) | dict(description.environment)
    own |= {"NOTIFY_SOCKET": str(notify_path), MARK: mark}
    if description.watchdog_s is not None:
        own["WATCHDOG_USEC"] = str(int(description.watchdog_s * 1e6))
    if description.store_limit:
        own["FDSTORE"] = str(description.store_limit)
    return own
