"""What a word without quotes means in a manifest: nothing, true or false, a plain decimal number, or text.

YAML 1.1 reads `010` as 8, `1:30` as 90 and 1.2 reads `0o17` as 15; such numbers are refused, whichever was meant.
A date stays text, for no setting holds one.
"""

import math
import re

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {
    **{word: True for lower in ("true", "yes", "on") for word in (lower, lower.title(), lower.upper())},
    **{word: False for lower in ("false", "no", "off") for word in (lower, lower.title(), lower.upper())},
}
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})", re.ASCII)
_FLOAT = re.compile(r"[-+]?([0-9]{1,30}\.[0-9]{0,30}|\.[0-9]{1,30})([eE][-+]?[0-9]{1,4})?", re.ASCII)
# What YAML 1.1 or 1.2 calls a number, and the two patterns above do not.
_ODD_NUMBER = re.compile(
    r"[-+]?(0[0-9_]+|0o[0-7_]+|0b[01_]+|0x[0-9a-f_]+|[0-9][0-9_]*(:[0-5]?[0-9])*(\.[0-9_]*)?(e[-+]?[0-9]+)?"
    r"|\.[0-9][0-9_]*(e[-+]?[0-9]+)?|\.inf)|\.nan",
    re.ASCII | re.IGNORECASE,
)


def plain_value(text: str) -> object:
    """Return None, a bool, an int, a finite float or the text itself."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def odd_number(text: str) -> tuple[str, str] | None:
    """Return what is wrong and the way out, for a word that is a number to YAML alone; otherwise None."""
    if not isinstance(plain_value(text), str) or not _ODD_NUMBER.fullmatch(text):
        return None
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    as_text = f'write "{shown}" if text is meant'
    digits = text.lstrip("+-")
    if ":" in text:
        return f"{shown} is a number to the base of 60 in YAML", as_text
    if digits.isdigit() and digits.startswith("0"):
        return f"{shown} looks like an octal number", f'write {shown.lstrip("+-0") or 0}, or "{shown}" if text is meant'
    if len(text) > 18:
        return f"{shown} is too large a number", "put it into quotes if text is meant"
    return f"{shown} is no plain decimal number", as_text
