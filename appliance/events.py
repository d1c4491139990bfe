"""One line for each thing that happens, for people on a terminal and as fields in systemd's journal.

`journalctl VERDICT=refused` works because fields go over journald's native socket when stderr is the journal.
"""

import contextlib
import os
import socket
import sys

from appliance.lines import printable

JOURNAL_SOCKET = "/run/systemd/journal/socket"

INFO, NOTICE, WARNING, ERROR = 6, 5, 4, 3


def event(text: str, *, priority: int = INFO, **fields: object) -> None:
    """Say one line; the fields (model=, root_digest=, verdict=, reason=) are upper-cased in the journal.

    Where nobody can be told, nothing happens: weights are not lost over a log that is full or closed.
    """
    line = _one_line(text)
    if _stderr_is_journal() and _to_journal(line, priority, fields):
        return
    tail = "".join(f" {name}={_shown(value)}" for name, value in fields.items() if value not in (None, ""))
    with contextlib.suppress(OSError):
        print(f"{line}{tail}", file=sys.stderr, flush=True)


def _stderr_is_journal() -> bool:
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stat = os.fstat(2)
    except OSError:
        return False
    return (str(stat.st_dev), str(stat.st_ino)) == (device, inode)


def _to_journal(line: str, priority: int, fields: dict[str, object]) -> bool:
    entry = {"MESSAGE": line, "PRIORITY": priority, "SYSLOG_IDENTIFIER": "appliance"}
    entry |= {name.upper(): value for name, value in fields.items() if value not in (None, "")}
    data = "".join(f"{name}={_one_line(value)}\n" for name, value in entry.items()).encode(errors="backslashreplace")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(data, JOURNAL_SOCKET)
    except OSError:  # the journal is restarting, or the line is larger than a datagram: stderr still works
        return False
    return True


def _shown(value: object) -> str:
    text = _one_line(value)
    return f'"{text}"' if " " in text else text


def _one_line(value: object) -> str:
    # Other processes choose some of these words, and a terminal would obey them.
    return printable(" ".join(str(value).split()))
