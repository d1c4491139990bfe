"""Strict JSON from somebody else: an object, each key once, no NaN; every failure is one domain error."""

import json
from typing import Any, NoReturn

from appliance.errors import ApplianceError, TrustError


def parse_object(
    data: bytes, *, what: str, limit_bytes: int, error: type[ApplianceError] = TrustError
) -> dict[str, Any]:
    """Return the JSON object in these UTF-8 bytes; `error`, naming `what`, for anything else.

    Refused: more than `limit_bytes`, nesting that exhausts the parser, repeated keys, NaN and infinities, numbers of
    thousands of digits, half surrogates, a byte order mark.
    """
    if len(data) > limit_bytes:
        raise error(f"{what}: {len(data)} bytes, more than the {limit_bytes} allowed")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_each_key_once, parse_constant=_refuse_constant)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is legal in JSON, in no file name
    except (ValueError, RecursionError) as failure:
        reason = "nested too deeply" if isinstance(failure, RecursionError) else str(failure)
        raise error(f"{what}: not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise error(f"{what}: not a JSON object")
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated!r} appears twice")
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
