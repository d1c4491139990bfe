"""What is wrong in a manifest, and where; all problems of a file travel in one error."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.errors import ConfigError, Place

SettingPath = tuple[str | int, ...]

MAX_SHOWN = 100

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one setting; its text is what the operator reads."""

    place: Place
    path: SettingPath
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        setting = f"{setting_name(self.path)}: " if self.path else ""
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{self.place}: {setting}{self.message}{hint}"


class ManifestError(ConfigError):
    """A manifest that cannot be used. `problems` holds what is wrong, in the order of the file, up to MAX_SHOWN."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = sorted(problems, key=lambda problem: (problem.place.line, problem.place.column))
        self.problems = tuple(found[:MAX_SHOWN])
        lines = [str(problem) for problem in self.problems]
        if len(found) > MAX_SHOWN:
            lines.append(f"and more; these are the first {MAX_SHOWN}")
        super().__init__("\n".join(lines))


def setting_name(path: SettingPath) -> str:
    """Return a path as messages write it: `models.chat.gpus[1]`."""
    name = ""
    for item in path:
        if isinstance(item, int):
            name += f"[{item}]"
        else:
            # A key is the operator's text: it must not break the line, nor fill the page.
            text = item if _PLAIN.fullmatch(item) else repr(item if len(item) <= 80 else f"{item[:77]}...")
            name += f".{text}" if name else text
    return name
