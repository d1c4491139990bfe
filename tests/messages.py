"""Every message of the wire, made at random."""

import dataclasses
import typing
from typing import Any

from hypothesis import strategies as st

from appliance import wire

EVERY_MESSAGE: list[type[wire.Message]] = wire.Message.__subclasses__()

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_SECONDS = st.floats(0, 1e9, allow_nan=False)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXT,
    int: st.integers(-(1 << 61), 1 << 61),
    bool: st.booleans(),
    float: _SECONDS,
    dict[str, str]: st.dictionaries(_TEXT, _TEXT, max_size=4),
    dict[str, float]: st.dictionaries(_TEXT, _SECONDS, max_size=4),
    dict[str, Any]: st.dictionaries(_TEXT, st.none() | st.integers(-9, 9) | _TEXT | st.lists(_TEXT), max_size=4),
    list[int]: st.lists(st.integers(-(1 << 61), 1 << 61), max_size=4),
    list[list[str]]: st.lists(st.lists(_TEXT, max_size=4), max_size=4),
}


def messages(kind: type[wire.Message], **usual: st.SearchStrategy[Any]) -> st.SearchStrategy[wire.Message]:
    """Return messages of a kind; a field named in `usual` has one of those values rather than any."""
    types = typing.get_type_hints(kind)
    return st.builds(
        kind, **{item.name: usual.get(item.name, _VALUES[types[item.name]]) for item in dataclasses.fields(kind)}
    )
