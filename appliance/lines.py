"""Lines out of a byte stream that nobody promised to be text: one at a time, bounded, safe to show on a terminal."""

import re
import unicodedata

LIMIT_BYTES = 8192

_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class LineSplitter:
    """Cuts what is fed to it at newlines. It never keeps more than `limit_bytes` of an unfinished line."""

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept = b""
        self._cut_bytes = 0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete now, printable and without their ends."""
        *ended, open_end = data.split(b"\n")
        lines = []
        for piece in ended:
            if not self._kept and b"\r" not in piece and len(piece) <= self._limit_bytes:  # nearly always
                lines.append(_text(piece))
                continue
            self._keep(piece)
            lines.append(self._take())
        self._keep(open_end)
        return lines

    def rest(self) -> list[str]:
        """Return the unfinished line, if there is one: the stream has ended."""
        return [self._take()] if self._kept.rstrip(b"\r") or self._cut_bytes else []

    def _keep(self, piece: bytes) -> None:
        # A progress bar rewrites its line after each carriage return: only what would be left on a screen counts.
        body = piece.rstrip(b"\r")
        if (start := body.rfind(b"\r") + 1) or (body and self._kept.endswith(b"\r")):
            self._kept, self._cut_bytes = b"", 0
        kept = self._kept + piece[start:]
        self._cut_bytes += max(0, len(kept) - self._limit_bytes)
        self._kept = kept[: self._limit_bytes]

    def _take(self) -> str:
        kept, cut_bytes = self._kept, self._cut_bytes
        self._kept, self._cut_bytes = b"", 0
        text = _text(kept.rstrip(b"\r"))
        return f"{text} [{cut_bytes} bytes cut]" if cut_bytes else text


def printable(text: str) -> str:
    """Return the text without terminal sequences, and with every other control character spelled out."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\t" or unicodedata.category(c) == "Zs" else _spelled(c)
        for c in _ESCAPE_SEQUENCE.sub("", text)
    )


def last_line(output: bytes) -> str:
    """Return the last line that says anything, or an empty string."""
    tail = output[-2 * LIMIT_BYTES :]
    splitter = LineSplitter()
    said = [line for line in [*splitter.feed(tail), *splitter.rest()] if line.strip()]
    return said[-1].strip() if said else ""


def _text(line: bytes) -> str:
    return printable(line.decode("utf-8", "backslashreplace"))


def _spelled(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
