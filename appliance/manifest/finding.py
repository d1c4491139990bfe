"""What a check of settings that are each right by themselves has found."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from appliance.manifest.problem import SettingPath


@dataclass(frozen=True)
class Finding:
    """One contradiction, or a warning where `is_error` is false.

    `reads` are the other settings whose defaults could lead to it. If one of them is wrong, and only therefore has its
    default, the finding says nothing.
    """

    path: SettingPath
    message: str
    hint: str | None = None
    reads: tuple[SettingPath, ...] = ()
    is_error: bool = True


def is_within(path: SettingPath, wrong: Collection[SettingPath]) -> bool:
    """Tell whether a setting is wrong, or in a group that is wrong as a whole."""
    return any(path[:length] in wrong for length in range(len(path) + 1))


def touches(paths: Iterable[SettingPath], wrong: Collection[SettingPath]) -> bool:
    """Tell whether one of these settings is wrong, is in a group that is, or has something wrong in it."""
    return any(path[: len(other)] == other or other[: len(path)] == path for path in paths for other in wrong)
