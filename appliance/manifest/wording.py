"""The words for what pydantic found: what is wrong with a setting, and the way out where there is only one."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from appliance.manifest.inventory import every_setting, example, known_path, required_settings
from appliance.manifest.problem import SettingPath, setting_name
from appliance.manifest.values import shown

# Comparing every known name with a page of text takes its time, and nobody mistypes one into the other.
_MAX_MISTYPED = 64


def worded(error: Any, *, path: SettingPath, text: str | None) -> tuple[str, str | None]:
    """Return message and hint for one of pydantic's ErrorDetails; `text` is the value as it stands in the file."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown setting", _meant_setting(path)
    if kind == "missing":
        return "is missing", _example(path)
    if kind == "refused":
        return context["what"], context["hint"] or _quotes(value, text)
    if kind in ("model_type", "dict_type"):
        return _wants_group(value, text, path=path)
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", context["expected"])
        return f"{_given(value, text)} is none of {', '.join(allowed)}", _meant(text, allowed)
    if kind in ("greater_than_equal", "less_than_equal"):
        least, most = context.get("ge"), context.get("le")
        return f"{value} is " + (f"less than {least}" if most is None else f"more than {most}"), None
    return _WANTS.get(kind, _wants_other)(value, text)


def _wants_group(value: object, text: str | None, *, path: SettingPath) -> tuple[str, str | None]:
    if value is not None:
        return f"wants settings below it, not {_given(value, text)}", None
    needed = required_settings(path)
    return "is empty", f"it needs {' and '.join(needed)}" if needed else "write {} to set nothing"


def _wants_list(value: object, text: str | None) -> tuple[str, str | None]:
    if value is None:
        return "is empty", "write [] for none"
    hint = f"write [{text}]" if text is not None and len(text) <= 40 else None
    return f"wants a list, not {_given(value, text)}", hint


def _wants_text(value: object, text: str | None) -> tuple[str, str | None]:
    if value in (None, ""):
        return "is empty", None
    return f"wants text, not {_given(value, text)}", _quotes(value, text)


def _wants_number(value: object, text: str | None) -> tuple[str, str | None]:
    if value is None:
        return "is empty", None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return f"wants a number, not the text {shown(value)}", "leave out the quotes"
    return f"wants a whole number, not {_given(value, text)}", None


def _wants_shorter(value: object, _: str | None) -> tuple[str, str | None]:
    return f"is too long: {len(str(value))} characters", None


def _wants_one_line(value: object, _: str | None) -> tuple[str, str | None]:
    return f"{shown(value)} has a line break or another control character in it", None


def _wants_other(value: object, text: str | None) -> tuple[str, str | None]:
    return f"{_given(value, text)} is not allowed here", None


_WANTS = {
    "tuple_type": _wants_list,
    "string_type": _wants_text,
    "string_too_short": _wants_text,
    "string_too_long": _wants_shorter,
    "string_pattern_mismatch": _wants_one_line,
    "int_type": _wants_number,
}


def _given(value: object, text: str | None) -> str:
    # `no` is what the operator reads in the file, and false is what YAML made of it.
    if isinstance(value, bool) and text is not None and text.lower() not in ("true", "false"):
        return f"{shown(value)} (to YAML, that is what {text} means)"
    return shown(value)


def _quotes(value: object, text: str | None) -> str | None:
    """Say how to write what YAML took for a truth value or a number."""
    if isinstance(value, bool | int | float) and text is not None:
        return f'write "{text}"'
    return None


def _example(path: SettingPath) -> str | None:
    value = example(path)
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return None if value is None else f"for example `{path[-1]}: {value}`"


def _meant_setting(path: SettingPath) -> str | None:
    """Say which setting a key that there is not was meant to be: one in another group, or one spelled nearly so."""
    name, group = str(path[-1]), known_path(path[:-1])
    everything = every_setting()
    elsewhere = [known[:-1] for known in everything if known[-1] == name and known[:-1] != group]
    near = _meant(name, (known[-1] for known in everything if known[:-1] == group))
    if not elsewhere:
        return near
    places = [setting_name(tuple("NAME" if item == "*" else item for item in place)) for place in elsewhere]
    return f"it belongs under {' or '.join(place or 'the top level' for place in places)}"


def _meant(text: str | None, known: Iterable[str]) -> str | None:
    if text is None or len(text) > _MAX_MISTYPED:
        return None
    near = difflib.get_close_matches(text.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else None
