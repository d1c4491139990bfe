"""The words for what pydantic found: what is wrong with a setting, and the way out where there is only one."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.manifest.inventory import every_setting, example, known_path, required_settings
from appliance.manifest.problem import SettingPath, setting_name
from appliance.manifest.values import shown

_WORD = re.compile(r"[\w./-]{1,60}")

Words = tuple[str, str | None]


def worded(error: Any, *, path: SettingPath, text: str | None) -> Words:
    """Return message and hint for one of pydantic's ErrorDetails; `text` is the value as it stands in the file."""
    mistake = _Mistake(path, error["input"], text, error.get("ctx", {}))
    return _WORDS.get(error["type"], _not_allowed)(mistake)


@dataclass(frozen=True)
class _Mistake:
    path: SettingPath
    value: object
    text: str | None
    context: Mapping[str, Any]

    @property
    def given(self) -> str:
        # `no` is what the operator reads in the file, and false is what YAML made of it.
        if isinstance(self.value, bool) and self.text is not None and self.text.lower() not in ("true", "false"):
            return f"{shown(self.value)} (to YAML, that is what {self.text} means)"
        return shown(self.value)

    @property
    def in_quotes(self) -> str | None:
        """How to write as text what YAML took for a truth value or a number."""
        if isinstance(self.value, bool | int | float) and self.text is not None:
            return f'write "{self.text}"'
        return None


def _unknown(mistake: _Mistake) -> Words:
    """Hint at the setting that was meant: one of that name in another group, or one spelled nearly so in this."""
    name, group = str(mistake.path[-1]), known_path(mistake.path[:-1])
    everything = every_setting()
    elsewhere = [known[:-1] for known in everything if known[-1] == name]
    if elsewhere:
        places = [setting_name(tuple("NAME" if item == "*" else item for item in place)) for place in elsewhere]
        return "unknown setting", f"it belongs under {' or '.join(place or 'the top level' for place in places)}"
    return "unknown setting", _nearest(name, [known[-1] for known in everything if known[:-1] == group])


def _missing(mistake: _Mistake) -> Words:
    value = example(mistake.path)
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return "is missing", None if value is None else f"for example `{mistake.path[-1]}: {value}`"


def _refused(mistake: _Mistake) -> Words:
    return mistake.context["what"], mistake.context["hint"]


def _no_group(mistake: _Mistake) -> Words:
    if mistake.value is not None:
        return f"wants settings below it, not {mistake.given}", None
    needed = required_settings(mistake.path)
    what = "is empty" if mistake.path else "the file is empty"
    return what, f"it needs {' and '.join(needed)}" if needed else "write {} for none"


def _no_list(mistake: _Mistake) -> Words:
    if mistake.value is None:
        return "is empty", "write [] for none"
    is_word = mistake.text is not None and _WORD.fullmatch(mistake.text)
    return f"wants a list, not {mistake.given}", f"write [{mistake.text}]" if is_word else None


def _no_choice(mistake: _Mistake) -> Words:
    allowed = re.findall(r"'([^']*)'", mistake.context["expected"])
    return f"{mistake.given} is none of {', '.join(allowed)}", _nearest(mistake.text, allowed)


def _no_text(mistake: _Mistake) -> Words:
    if mistake.value in (None, ""):
        return "is empty", None
    return f"wants text, not {mistake.given}", mistake.in_quotes


def _no_number(mistake: _Mistake) -> Words:
    value = mistake.value
    if value is None:
        return "is empty", None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return f"wants a number, not the text {shown(value)}", "leave out the quotes"
    return f"wants a whole number, not {mistake.given}", None


def _too_small(mistake: _Mistake) -> Words:
    return f"{mistake.value} is less than {mistake.context['ge']}", None


def _too_large(mistake: _Mistake) -> Words:
    return f"{mistake.value} is more than {mistake.context['le']}", None


def _too_long(mistake: _Mistake) -> Words:
    return f"has {len(str(mistake.value))} characters, more than {mistake.context['max_length']}", None


def _not_one_line(mistake: _Mistake) -> Words:
    return f"{mistake.given} has a line break or another control character in it", None


def _not_allowed(mistake: _Mistake) -> Words:
    return f"{mistake.given} is not allowed here", None


_WORDS: Mapping[str, Callable[[_Mistake], Words]] = {
    "dict_type": _no_group,
    "extra_forbidden": _unknown,
    "greater_than_equal": _too_small,
    "int_type": _no_number,
    "less_than_equal": _too_large,
    "literal_error": _no_choice,
    "missing": _missing,
    "model_type": _no_group,
    "refused": _refused,
    "string_pattern_mismatch": _not_one_line,
    "string_too_long": _too_long,
    "string_too_short": _no_text,
    "string_type": _no_text,
    "tuple_type": _no_list,
}


def _nearest(text: str | None, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(text.lower(), list(known), n=1) if text is not None else []
    return f"did you mean {near[0]}?" if near else None
