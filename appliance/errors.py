"""Every failure an operator can meet, sorted by who must act; the exit status says it to systemd.

Raise these anywhere; only the command line and the process entry points turn one into an exit.
"""

from dataclasses import dataclass

EXIT_MISS = 69  # EX_UNAVAILABLE
EXIT_HOST = 71  # EX_OSERR
EXIT_RESOURCE = 75  # EX_TEMPFAIL
EXIT_PEER = 76  # EX_PROTOCOL
EXIT_TRUST = 77  # EX_NOPERM
EXIT_CONFIG = 78  # EX_CONFIG

# What a restart cannot cure: these go into RestartPreventExitStatus= and stop `appliance up` from trying again.
NOT_CURED_BY_RESTART = frozenset({EXIT_MISS, EXIT_TRUST, EXIT_CONFIG})


class ApplianceError(Exception):
    """One line for the operator, with at most one hint. Never a bug of ours: those keep their traceback."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class ConfigError(ApplianceError):
    """The operator must edit something."""

    exit_status = EXIT_CONFIG


class TrustError(ApplianceError):
    """Do not trust these bytes: a bad signature, an unknown key, a file that differs from its digest."""

    exit_status = EXIT_TRUST


class MissError(ApplianceError):
    """The keeper does not hold what this engine asks for, and the manifest says `on_miss: fail`."""

    exit_status = EXIT_MISS


class ResourceError(ApplianceError):
    """Busy or full: it may work later, or after something else is stopped."""

    exit_status = EXIT_RESOURCE


class PeerError(ApplianceError):
    """The process at the other end of a socket broke the protocol or went away."""

    exit_status = EXIT_PEER


class HostError(ApplianceError):
    """The machine refused: a system call, a driver, a file system."""

    exit_status = EXIT_HOST


_KINDS = (ConfigError, TrustError, MissError, ResourceError, PeerError, HostError)


def error_of_status(exit_status: int, message: str) -> ApplianceError:
    """Return the error with which a child of ours ended, as it would have been raised here."""
    kind = next((kind for kind in _KINDS if kind.exit_status == exit_status), ApplianceError)
    return kind(message)


@dataclass(frozen=True)
class Place:
    """Where in a file a setting stands; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"
