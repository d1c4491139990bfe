"""YAML text as plain data, with the place of every setting.

A small, safe part of YAML: no tags, anchors, aliases or merge keys, so nothing can be constructed or expanded.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from appliance.errors import Place
from appliance.manifest.problem import MAX_SHOWN, ManifestError, Problem, SettingPath
from appliance.manifest.scalar import odd_number, plain_value

MAX_BYTES = 1 << 20
MAX_DEPTH = 16

# The parser in C is ten times faster and sets the same marks.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Characters that make a file look other than it is read: controls, the line breaks of YAML that no editor shows as
# such (also a carriage return alone), and those that turn the direction of writing.
_UNWANTED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff]|\r(?!\n)"
)
_UNWANTED_IN_VALUE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")

# The parser's words, in C and in Python, and what an operator has usually done.
_SYNTAX_HINTS = {
    "mapping values are not allowed": "look at the indentation, and put text that has `: ` in it into quotes",
    "character '\\t'": "indent with spaces, not with tabs",
    "cannot start any token": "indent with spaces, not with tabs, and put text that begins with @, % or ` into quotes",
    "expected key": "look at the indentation",
    "expected <block end>": "look at the indentation",
    "expected ':'": "write `key: value`",
    "expected ','": "a bracket is not closed, or a comma is missing",
    "node content": "a bracket is not closed, or a comma is too much",
    "unexpected end of stream": "a quote is not closed",
}


@dataclass(frozen=True)
class Setting:
    """Where one setting stands, and how it is written if it is a single word or text."""

    key: Place
    value: Place
    text: str | None = None


@dataclass(frozen=True)
class Document:
    """A file as data. `unread` are the settings whose values were refused; they are None in `data`."""

    data: object
    settings: Mapping[SettingPath, Setting]
    problems: tuple[Problem, ...]
    unread: frozenset[SettingPath]

    def value_place(self, path: SettingPath) -> Place:
        """Return where the value stands; where the setting is left out, the key of the closest group around it."""
        return self.settings[path].value if path in self.settings else self.key_place(path)

    def key_place(self, path: SettingPath) -> Place:
        """Return where the key stands; where the setting is left out, the key of the closest group around it."""
        while path not in self.settings:
            path = path[:-1]
        return self.settings[path].key


def parse_document(source: bytes, *, file: str, loader: Any = LOADER) -> Document:
    """Return the one document in these bytes. ManifestError if they are no YAML, or nest deeper than MAX_DEPTH.

    What else is refused (tags, anchors, aliases, keys that are repeated or no text, odd numbers) is in the document's
    `problems`, so that it can be reported together with what the schema finds.
    """
    text = _text(source, file=file)
    builder = _Builder(file)
    try:
        return builder.document(yaml.parse(text, Loader=loader))
    except yaml.MarkedYAMLError as error:
        problem = _syntax_problem(error, text, file=file)
    except (yaml.YAMLError, ValueError, OverflowError, IndexError):
        # The parser in Python lets out what chr() and int() raise on a bad escape or directive.
        problem = Problem(builder.place, (), "after this it is not YAML")
    except _TooDeep as error:
        problem = Problem(error.place, (), f"nested deeper than {MAX_DEPTH} levels")
    raise ManifestError([*builder.problems, problem])


def _text(source: bytes, *, file: str) -> str:
    if len(source) > MAX_BYTES:
        message = f"larger than {MAX_BYTES >> 20} MiB, so it is no manifest"
        raise ManifestError([Problem(Place(file, 1, 1), (), message)])
    try:
        text = source.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = source[: error.start].decode("utf-8").removeprefix("\ufeff")
        message = f"byte 0x{source[error.start]:02x} is not UTF-8"
        raise ManifestError([Problem(_end_of(before, file), (), message, "save the file as UTF-8")]) from None
    unwanted = _UNWANTED.search(text)
    if unwanted is not None:
        message = f"the character U+{ord(unwanted[0]):04X} does not belong in a manifest"
        raise ManifestError([Problem(_end_of(text[: unwanted.start()], file), (), message)])
    return text


def _end_of(text: str, file: str) -> Place:
    return Place(file, text.count("\n") + 1, len(text) - (text.rfind("\n") + 1) + 1)


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, *, file: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    end = _end_of(text.rstrip("\n"), file)
    place = end if mark is None else Place(file, mark.line + 1, mark.column + 1)
    # The end of the file is on a line that no editor has, to the parser in C.
    place = min(place, end, key=lambda place: (place.line, place.column))
    what = error.problem or error.context or "broken"
    hint = next((hint for words, hint in _SYNTAX_HINTS.items() if words in what), None)
    begun = error.context_mark
    if begun is not None and error.problem and begun.line + 1 != place.line:
        what += f", {error.context} that begins at {begun.line + 1}:{begun.column + 1}"
    return Problem(place, (), f"not YAML: {what}", hint)


class _TooDeep(Exception):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place


@dataclass
class _Builder:
    """Builds data from the parser's events, noting places and problems on the way."""

    file: str
    place: Place = field(init=False)
    settings: dict[SettingPath, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unread: set[SettingPath] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.place = Place(self.file, 1, 1)

    def document(self, events: Iterator[Any]) -> Document:
        self._events = events
        start = self.place
        data: object = None
        documents = 0
        while not isinstance(event := self._next(), yaml.StreamEndEvent):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._problem((), "a second document begins here, and a manifest is one")
                    break
            elif not isinstance(event, yaml.StreamStartEvent | yaml.DocumentEndEvent):
                data = self._value(event, (), key=start)
        # Problems without a place of their own belong to the file as a whole, not to its first setting.
        self.settings[()] = Setting(start, start)
        return Document(data, self.settings, tuple(self.problems), frozenset(self.unread))

    def _next(self) -> Any:
        event = next(self._events)
        self.place = Place(self.file, event.start_mark.line + 1, event.start_mark.column + 1)
        return event

    def _value(self, event: Any, path: SettingPath, *, key: Place | None) -> object:
        if len(path) > MAX_DEPTH:
            raise _TooDeep(self.place)
        is_scalar = isinstance(event, yaml.ScalarEvent)
        value = self.place
        # An empty value stands nowhere, and a group in lines of its own begins below: its key is where one looks.
        if key is not None and (_is_block(event) or (is_scalar and not event.value)):
            value = key
        self.settings[path] = Setting(key or value, value, event.value if is_scalar else None)
        if self._is_refused(event, path):
            self.unread.add(path)
            self._skip(event)
            return None
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._scalar(event, path)

    def _is_refused(self, event: Any, path: SettingPath) -> bool:
        if isinstance(event, yaml.AliasEvent):
            self._problem(path, f"alias *{str(event.anchor)[:40]}: aliases are not used here", "write the value out")
            return True
        if event.anchor is not None:
            # What it names is read all the same, so that what else is wrong in there is reported too.
            self._problem(path, f"anchor &{event.anchor[:40]}: anchors are not used here", "remove it")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")[:60]
            hint = "put the value into quotes instead" if tag == "!!str" else "remove it"
            self._problem(path, f"tag {tag!r}: tags are not used here", hint)
        return event.tag is not None

    def _mapping(self, path: SettingPath) -> dict[str, object]:
        data: dict[str, object] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            place = self.place
            key = self._key(event, path)
            value = self._next()
            if key is None:
                self._skip(value)
            elif key in data:
                first = self.settings[*path, key].key
                self._problem((*path, key), f"is set twice, first at {first}", "remove one of them", place=place)
                self._skip(value)
            else:
                data[key] = self._value(value, (*path, key), key=place)
        return data

    def _key(self, event: Any, path: SettingPath) -> str | None:
        is_refused = self._is_refused(event, path)
        if not isinstance(event, yaml.ScalarEvent):
            if not is_refused:
                self._problem(path, "a list or group cannot be a key")
            self._skip(event)
            return None
        text: str = event.value
        if event.implicit[0] and text == "<<":
            self._problem(path, "<<: merge keys are not used here", "write the settings out")
            return None
        if event.implicit[0] and (not isinstance(plain_value(text), str) or odd_number(text)):
            shown = text if len(text) <= 40 else f"{text[:37]}..."
            what = f"key {shown} is no text to YAML" if text else "a key is empty"
            self._problem(path, what, f'write "{shown}"' if text else None)
            return None
        return text if self._is_clean(text, path) else None

    def _sequence(self, path: SettingPath) -> list[object]:
        data: list[object] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            data.append(self._value(event, (*path, len(data)), key=None))
        return data

    def _scalar(self, event: Any, path: SettingPath) -> object:
        text: str = event.value
        odd = odd_number(text) if event.implicit[0] else None
        if odd is not None:
            self._problem(path, *odd)
        if odd is not None or not self._is_clean(text, path):
            self.unread.add(path)
            return None
        return plain_value(text) if event.implicit[0] else text

    def _is_clean(self, text: str, path: SettingPath) -> bool:
        # "\0" in double quotes is an escape: the source was clean, and the text is not.
        unwanted = _UNWANTED_IN_VALUE.search(text)
        if unwanted is not None:
            self._problem(path, f"has the character U+{ord(unwanted[0]):04X} in it")
        return unwanted is None

    def _skip(self, event: Any) -> None:
        depth = _opens(event)
        while depth:
            if depth > MAX_DEPTH:
                raise _TooDeep(self.place)
            depth += _opens(self._next())

    def _problem(self, path: SettingPath, message: str, hint: str | None = None, *, place: Place | None = None) -> None:
        self.problems.append(Problem(place or self.place, path, message, hint))
        if len(self.problems) > MAX_SHOWN:
            raise ManifestError(self.problems)


def _is_block(event: Any) -> bool:
    return isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent) and not event.flow_style


def _opens(event: Any) -> int:
    if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
        return 1
    return -1 if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent) else 0
