"""Durations and byte sizes as people write them: `90s`, `1h30m`, `4 GiB`.

`m` is a minute, never a month or a million; `4G` is refused, because it leaves open whether 1000 or 1024 is meant.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal, localcontext

from appliance.errors import ConfigError

# More is a typing error, and more than a few centuries overflow the clocks of the kernel.
MAX_DURATION_S = 366 * 86400
MAX_SIZE_BYTES = 2**63 - 1  # what off_t can say

_SECONDS = {"d": Decimal(86400), "h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_BYTES: dict[str, int] = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTP", start=1)},
}
_NUMBER = r"[0-9]{1,19}(?:\.[0-9]{1,9})?"
_BARE = re.compile(_NUMBER)
_PART = re.compile(rf"\s*({_NUMBER})\s*(ms|[dhms])", re.ASCII)
_SIZE = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)", re.ASCII)


def parse_duration(value: str | float) -> float:
    """Return seconds; a bare number is seconds already. ConfigError if it is no duration of at most a year."""
    seconds: Decimal | float
    if isinstance(value, str):
        seconds = _sum_of_parts(value)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise _no_duration(value)
    else:
        seconds = value
    if not 0 <= seconds <= MAX_DURATION_S:  # false for NaN too
        raise ConfigError(f"{_shown(value)} is not between 0 and 366 days")
    return float(seconds)


def format_duration(seconds: float) -> str:
    """Return three digits below a minute (`8.25ms`, `4.2s`), whole seconds above (`1h30m`)."""
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{seconds} seconds is no duration")
    if seconds == 0:
        return "0s"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)}ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)}s"
    rest, text = round(seconds), ""
    for unit in "dhms":
        count, rest = divmod(rest, int(_SECONDS[unit]))
        text += f"{count}{unit}" if count else ""
    return text


def format_phases(phases_s: Mapping[str, float]) -> str:
    """Return the seconds of each phase in their order, as `check 0.013 s, skeleton 0.078 s`; empty without any."""
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases_s.items())


def parse_size(value: str | int) -> int:
    """Return bytes; a bare number is bytes already. ConfigError if it is no size, or its unit is ambiguous."""
    if isinstance(value, str):
        size = _number_and_unit(value)
    elif isinstance(value, bool) or not isinstance(value, int):
        raise _no_size(value)
    else:
        size = value
    if not 0 <= size <= MAX_SIZE_BYTES:
        raise ConfigError(f"{_shown(value)} is not between 0 and {MAX_SIZE_BYTES} bytes")
    return size


def format_size(size_bytes: int) -> str:
    """Return the size in the largest binary unit that it fills, with one decimal unless it comes out even."""
    if size_bytes < 0:
        raise ValueError(f"{size_bytes} bytes is no size")
    unit, scale = "bytes", 1
    for prefix in "KMGTP":
        # 1023.96 KiB would be shown as 1024.0 KiB
        if size_bytes * 20 < scale * 1024 * 20 - scale:
            break
        unit, scale = f"{prefix}iB", scale * 1024
    whole, rest = divmod(size_bytes, scale)
    return f"{whole} {unit}" if rest == 0 else f"{size_bytes / scale:.1f} {unit}"


def _sum_of_parts(text: str) -> Decimal:
    stripped = text.strip()
    if _BARE.fullmatch(stripped):
        return Decimal(stripped)
    units = list(_SECONDS)
    total, end = Decimal(0), 0
    with localcontext() as context:
        context.prec = 50
        while end < len(stripped):
            part = _PART.match(stripped, end)
            # Each unit once and in falling order: `30s1h` and `5m5m` are typing errors more often than meant.
            if part is None or part[2] not in units:
                raise _no_duration(text)
            units = units[units.index(part[2]) + 1 :]
            total += Decimal(part[1]) * _SECONDS[part[2]]
            end = part.end()
    if not stripped:
        raise _no_duration(text)
    return total


def _number_and_unit(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise _no_size(text)
    number, unit = found.groups()
    if unit in ("", "B") and "." in number:
        raise ConfigError(f"{_shown(text)} is no whole number of bytes")
    if unit and unit not in _BYTES:
        binary = next(
            (known for known in _BYTES if known.endswith("iB") and unit.upper() in (known[0], known.upper())), None
        )
        hint = None if binary is None else f"write {number} {binary} (1024) or {number} {_decimal(binary)} (1000)"
        raise ConfigError(f"{_shown(text)} has an unknown unit {_shown(unit)}", hint=hint)
    with localcontext() as context:
        context.prec = 50
        return int(Decimal(number) * _BYTES.get(unit, 1))


def _decimal(binary: str) -> str:
    return "kB" if binary == "KiB" else f"{binary[0]}B"


def _three_digits(number: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(number)))
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _no_duration(value: object) -> ConfigError:
    return ConfigError(f"{_shown(value)} is no duration", hint="write it like 90s, 5m or 1h30m (units d, h, m, s, ms)")


def _no_size(value: object) -> ConfigError:
    return ConfigError(f"{_shown(value)} is no size", hint="write it like 512 MiB or 4 GiB")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
