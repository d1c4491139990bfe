"""What a check of settings that are each right by themselves has found."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from appliance.manifest.problem import SettingPath


@dataclass(frozen=True)
class Finding:
    """One contradiction, or a warning where `is_error` is false.

    `reads` are the other settings that it depends on: if one of them is wrong already, the finding says nothing.
    """

    path: SettingPath
    message: str
    hint: str | None = None
    reads: tuple[SettingPath, ...] = ()
    is_error: bool = True


def touches(paths: Iterable[SettingPath], wrong: Collection[SettingPath]) -> bool:
    """Tell whether one of these settings is wrong, is in a group that is, or has something wrong in it."""
    return any(path[: len(other)] == other or other[: len(path)] == path for path in paths for other in wrong)
