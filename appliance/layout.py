"""Where each tensor of a shard lies in its slabs. Pure values and their bytes; no torch here.

A layout arrives from another process: `decode` lets nothing through that would make a view outside of its slab.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from appliance.errors import PeerError
from appliance.slabs.interface import LIMIT_SLABS

VERSION = 2
LIMIT_BYTES = 16 << 20
LIMIT_ENTRIES = 100_000
LIMIT_STEPS = 64
LIMIT_TEXT = 1024
LIMIT_DIMENSIONS = 64
LIMIT_INTEGER = 2**62  # sums and products of what is checked against it stay clear of torch's 64 bits
ALIGNMENT_BYTES = 512  # of a region in its slab: what torch's own device allocator gives

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "bits16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by torch's name of the dtype without `torch.`; quantized dtypes carry more than bytes."""


class Key(NamedTuple):
    """A step into a dict. The other steps are a str, an attribute's name, and an int, a place in a list or tuple."""

    value: str | int


Step = str | int | Key
Path = tuple[Step, ...]
Kind = Literal["parameter", "buffer", "attribute"]
_KINDS: tuple[Kind, ...] = ("parameter", "buffer", "attribute")
_ATTRIBUTE = _KINDS.index("attribute")


# Regions and entries are tuples, because a start makes thousands of them.
class Region(NamedTuple):
    """One stretch of one storage.

    A process that attaches reads a `shared` one where it lies, through the read-only mapping. Of the others it makes a
    private copy, because it may write to them.
    """

    slab: int
    offset_bytes: int
    size_bytes: int
    shared: bool


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, apart from where: the same for the many like tensors of a model.

    Shape and stride count elements. `type_name` is the class of the tensor object. `conjugated` and `negated` are the
    bits of torch's lazy views. A tensor `on_host` is in host memory wherever its slab is, hence always a copy.
    """

    type_name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    conjugated: bool
    negated: bool
    on_host: bool

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def extent_bytes(self) -> int:
        """Return how many bytes there are from the first element to the end of the last in memory."""
        if 0 in self.shape:
            return 0
        reach = sum([(count - 1) * step for count, step in zip(self.shape, self.stride, strict=True)])
        return (1 + reach) * self.item_bytes


class TensorEntry(NamedTuple):
    """One place in a module that holds a tensor, and where the tensor's bytes are.

    The offset is from the start of the region, which is None for a tensor without elements. `alias` is the index of
    the first entry that holds the very same tensor object; such an entry repeats the other's spec, region and offset.
    `persistent` is false for what is not in a `state_dict`.
    """

    path: Path
    kind: Kind
    persistent: bool
    spec: TensorSpec
    region: int | None
    offset_bytes: int
    alias: int | None

    @property
    def name(self) -> str:
        return shown(self.path)


# A named tuple's own `__new__` and `_make` are Python, which takes longer than the check of what they are given.
_new_region: Callable[[Iterable[Any]], Region] = partial(tuple.__new__, Region)
_new_entry: Callable[[Iterable[Any]], TensorEntry] = partial(tuple.__new__, TensorEntry)


@dataclass(frozen=True, slots=True)
class Layout:
    """A shard's slabs, the regions in them and the tensors in those.

    Regions are sorted by slab and offset, and disjoint. An alias points backwards, at an entry that is no alias.
    """

    slab_sizes: tuple[int, ...]
    regions: tuple[Region, ...]
    entries: tuple[TensorEntry, ...]

    def encode(self) -> bytes:
        """Return the bytes that `decode` reads: compact JSON, the same for equal layouts."""
        specs = {spec: index for index, spec in enumerate(dict.fromkeys(entry.spec for entry in self.entries))}
        document = {
            "v": VERSION,
            "slabs": self.slab_sizes,
            "regions": _columns(self.regions, len(Region._fields)),
            "specs": [_spec_fields(spec) for spec in specs],
            "entries": _columns([_entry_fields(entry, specs) for entry in self.entries], len(TensorEntry._fields)),
        }
        return json.dumps(document, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Layout:
    """Return the layout in these bytes only if all of this holds; PeerError on the first that does not.

    1. they are JSON of this version, within the limits above, every value of its type, no path twice
    2. regions are aligned, sorted, disjoint, each inside its slab
    3. every tensor's bytes, strides counted in, are inside its region, elements at multiples of their size
    4. aliases point backwards, at entries that are no aliases and lie where they do

    Regions and entries are written as one list for each of their fields, which is checked as a whole.
    """
    document = _json(data)
    if type(document) is not dict or document.keys() != {"v", "slabs", "regions", "specs", "entries"}:
        raise PeerError("layout: not an object with v, slabs, regions, specs and entries")
    if document["v"] != VERSION:
        raise PeerError(f"layout: version {str(document['v'])[:20]!r}, this process reads {VERSION}")
    slab_sizes = _slab_sizes(document["slabs"])
    regions = _regions(_lists(document["regions"], "regions", len(Region._fields)), slab_sizes)
    if not _is_list(document["specs"]):
        raise PeerError(f"layout: specs: not a list of at most {LIMIT_ENTRIES}")
    specs = [_spec(fields, index) for index, fields in enumerate(document["specs"])]
    entries = _entries(_lists(document["entries"], "entries", len(TensorEntry._fields)), specs, regions)
    return Layout(slab_sizes, regions, entries)


def shown(path: Path) -> str:
    """Return the path as Python writes it: `model.layers.0.scales['k'][1]`."""
    text = ""
    for step in path:
        if isinstance(step, str):
            text += f".{step}" if text else step
        else:
            text += f"[{step.value!r}]" if isinstance(step, Key) else f"[{step}]"
    return text


def _columns(rows: Sequence[tuple[object, ...]], width: int) -> list[tuple[object, ...]]:
    return list(zip(*rows, strict=True)) or [()] * width


def _entry_fields(entry: TensorEntry, specs: dict[TensorSpec, int]) -> tuple[object, ...]:
    path, kind, persistent, spec, region, offset_bytes, alias = entry
    return (_path_field(path), _KINDS.index(kind), persistent, specs[spec], region, offset_bytes, alias)


def _path_field(path: Path) -> object:
    """Return names joined by dots where there is nothing else in a path, which is usual."""
    if all(type(step) is str and "." not in step for step in path):
        return ".".join(map(str, path))
    return [[step.value] if isinstance(step, Key) else step for step in path]


def _spec_fields(spec: TensorSpec) -> tuple[object, ...]:
    flags = spec.requires_grad | spec.conjugated << 1 | spec.negated << 2 | spec.on_host << 3
    return (spec.type_name, spec.dtype, spec.shape, spec.stride, flags)


def _json(data: bytes) -> Any:
    if len(data) > LIMIT_BYTES:
        raise PeerError(f"layout: {len(data)} bytes, more than the {LIMIT_BYTES} allowed")
    try:
        return json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise PeerError(f"layout: not JSON: {str(error)[:80]}") from error


def _is_list(value: Any) -> bool:
    return type(value) is list and len(value) <= LIMIT_ENTRIES


def _lists(value: Any, name: str, count: int) -> list[list[Any]]:
    """Return the lists of one table's fields, once they are so many and of one length."""
    if type(value) is not list or len(value) != count or not all(map(_is_list, value)) or len(set(map(len, value))) > 1:
        raise PeerError(f"layout: {name}: not {count} lists of one length, which is at most {LIMIT_ENTRIES}")
    return value


def _slab_sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > LIMIT_SLABS or not all(map(_is_size, value)) or 0 in value:
        raise PeerError(f"layout: slabs: not a list of at most {LIMIT_SLABS} sizes")
    return tuple(value)


def _regions(lists: list[list[Any]], slab_sizes: tuple[int, ...]) -> tuple[Region, ...]:
    slabs, offsets, sizes, shared = lists
    _check_integers(slabs, 0, len(slab_sizes) - 1, "region", "no such slab")
    _check_integers(offsets, 0, LIMIT_INTEGER, "region", "its offset is no size")
    _check_integers(sizes, 1, LIMIT_INTEGER, "region", "empty, or its size is none")
    _check_types(shared, {bool}, "region", "shared is neither true nor false")
    last_slab = last_end = 0
    for index, (slab, offset_bytes, size_bytes) in enumerate(zip(slabs, offsets, sizes, strict=True)):
        end = offset_bytes + size_bytes
        if end > slab_sizes[slab] or offset_bytes % ALIGNMENT_BYTES:
            raise _bad("region", index, "unaligned or outside of its slab")
        if slab < last_slab or (slab == last_slab and offset_bytes < last_end):
            raise _bad("region", index, "overlaps the one before it, or is out of order")
        last_slab, last_end = slab, end
    return tuple(map(_new_region, zip(*lists, strict=True)))


def _spec(fields: Any, index: int) -> TensorSpec:
    if type(fields) is not list or len(fields) != 5:
        raise _bad("spec", index, "not five fields")
    type_name, dtype, shape, stride, flags = fields
    if not _is_text(type_name):
        raise _bad("spec", index, "its type is not printable text")
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise _bad("spec", index, f"unknown dtype {str(dtype)[:20]!r}")
    if (
        type(shape) is not list
        or type(stride) is not list
        or len(shape) != len(stride)
        or len(shape) > LIMIT_DIMENSIONS
    ):
        raise _bad("spec", index, "shape and stride are not two lists of one length")
    if not all(map(_is_size, shape)) or not all(map(_is_size, stride)):
        raise _bad("spec", index, "shape or stride has what is not a size")
    if type(flags) is not int or not 0 <= flags < 16:
        raise _bad("spec", index, "unknown flags")
    # torch multiplies these in 64 bits, also where a size of 0 makes the tensor empty.
    reach = math.prod([max(count, 1) for count in shape]) * ITEM_BYTES[dtype]
    if reach > LIMIT_INTEGER or sum([count * step for count, step in zip(shape, stride, strict=True)]) > LIMIT_INTEGER:
        raise _bad("spec", index, "larger than any memory")
    bits = [bool(flags & 1 << bit) for bit in range(4)]
    return TensorSpec(type_name, dtype, tuple(shape), tuple(stride), *bits)


def _entries(lists: list[list[Any]], specs: Sequence[TensorSpec], regions: Sequence[Region]) -> tuple[TensorEntry, ...]:
    fields, kinds, persistent, numbers, places, offsets, aliases = lists
    _check_integers(kinds, 0, len(_KINDS) - 1, "entry", "unknown kind")
    _check_types(persistent, {bool}, "entry", "persistent is neither true nor false")
    _check_integers(numbers, 0, len(specs) - 1, "entry", "no such spec")
    _check_integers(places, 0, len(regions) - 1, "entry", "no such region", optional=True)
    _check_integers(offsets, 0, LIMIT_INTEGER, "entry", "its offset is no size")
    _check_integers(aliases, 0, len(kinds) - 1, "entry", "its alias is no entry", optional=True)
    paths = _paths(fields)
    extents = [(spec.extent_bytes, spec.item_bytes) for spec in specs]
    rows = zip(paths, kinds, numbers, places, offsets, aliases, strict=True)
    for index, (path, kind, number, place, offset_bytes, alias) in enumerate(rows):
        extent_bytes, item_bytes = extents[number]
        if offset_bytes % item_bytes:
            raise _bad("entry", index, "its offset is no multiple of its element's size")
        if place is None:
            if extent_bytes or offset_bytes:
                raise _bad("entry", index, "it has elements and no region")
        elif not extent_bytes:
            raise _bad("entry", index, "it has a region, and nothing to find there")
        elif offset_bytes + extent_bytes > regions[place].size_bytes:
            raise _bad("entry", index, "outside of its region")
        if kind != _ATTRIBUTE and type(path[-1]) is not str:
            raise _bad("entry", index, "a parameter or buffer without a name")
        if alias is not None:
            if alias >= index or aliases[alias] is not None:
                raise _bad("entry", index, "its alias is no earlier entry with a tensor of its own")
            if (number, place, offset_bytes) != (numbers[alias], places[alias], offsets[alias]):
                raise _bad("entry", index, "it lies elsewhere than its alias")
    named = map(_KINDS.__getitem__, kinds)
    sorts = map(specs.__getitem__, numbers)
    return tuple(map(_new_entry, zip(paths, named, persistent, sorts, places, offsets, aliases, strict=True)))


def _paths(fields: list[Any]) -> list[Path]:
    paths: list[Path] = []
    for index, field in enumerate(fields):
        # What is checked in a call of its own would take as long as all the rest, so here is what is usual.
        if type(field) is str and len(field) <= LIMIT_TEXT and field.isprintable() and field.count(".") < LIMIT_STEPS:
            paths.append(tuple(field.split(".")))
        else:
            paths.append(_path(field, index))
    if len(set(paths)) != len(paths):
        raise PeerError("layout: entries: the same path twice")
    return paths


def _path(field: Any, index: int) -> Path:
    steps = field.split(".") if type(field) is str else field
    if type(steps) is not list or not 0 < len(steps) <= LIMIT_STEPS:
        raise _bad("entry", index, f"its path is not one to {LIMIT_STEPS} steps")
    return tuple([_step(step, index) for step in steps])


def _step(step: Any, index: int) -> Step:
    if _is_text(step) or _is_size(step):
        return step  # type: ignore[no-any-return]
    if type(step) is list and len(step) == 1 and (_is_text(step[0]) or _is_integer(step[0])):
        return Key(step[0])
    raise _bad("entry", index, "a step is neither printable text, an index nor a key")


def _check_types(values: list[Any], kinds: set[type], what: str, reason: str) -> None:
    """Raise PeerError, naming the first value of another type."""
    if not set(map(type, values)) <= kinds:
        raise _bad(what, next(index for index, value in enumerate(values) if type(value) not in kinds), reason)


def _check_integers(
    values: list[Any], least: int, most: int, what: str, reason: str, *, optional: bool = False
) -> None:
    """Raise PeerError, naming the first value that is no integer between these two; None is one if `optional`."""
    _check_types(values, {int, type(None)} if optional else {int}, what, reason)
    numbers = [value for value in values if value is not None] if optional else values
    if numbers and not least <= min(numbers) <= max(numbers) <= most:
        wrong = (index for index, value in enumerate(values) if value is not None and not least <= value <= most)
        raise _bad(what, next(wrong), reason)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LIMIT_INTEGER


def _is_integer(value: Any) -> bool:
    return type(value) is int and -LIMIT_INTEGER <= value <= LIMIT_INTEGER


def _is_text(value: Any) -> bool:
    # A lone surrogate is not printable either: it would fail later, where a message is written.
    return type(value) is str and len(value) <= LIMIT_TEXT and value.isprintable()


def _bad(what: str, index: int, reason: str) -> PeerError:
    return PeerError(f"layout: {what} {index}: {reason}")
