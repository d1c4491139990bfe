"""systemctl, and how long it may take."""

from collections.abc import Collection

from appliance.run import run

NOT_LOADED = 5  # of a unit that systemd knows nothing of, or no longer

RELOAD_TIMEOUT_S = 60.0
# A load says how far it is, and systemd ends one that does not get on.
START_TIMEOUT_S = 24 * 3600.0


def systemctl(*arguments: str, timeout_s: float, accept: Collection[int] = (0,)) -> str:
    """Run systemctl and return its output; HostError with its last line where its status is none of `accept`."""
    return run(["systemctl", "--no-ask-password", *arguments], timeout_s=timeout_s, accept=accept).stdout


def active_state(unit: str) -> str:
    """Return `active`, `activating`, `failed`, `inactive`, ...; systemd(1)."""
    return systemctl("show", "--property=ActiveState", "--value", unit, timeout_s=RELOAD_TIMEOUT_S).strip()
