"""Where each tensor of a shard lies in its slabs. Pure values and their bytes; no torch here.

A layout arrives from another process: `decode` lets nothing through that would make a view outside of its slab.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from appliance.errors import PeerError
from appliance.slabs.interface import LIMIT_SLABS

VERSION = 1
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
_T = TypeVar("_T")
_KINDS: tuple[Kind, ...] = ("parameter", "buffer", "attribute")
_PATH = itemgetter(0)


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
        holders = _Table[Path]()
        holders.index(())
        specs = _Table[TensorSpec]()
        entries = [_entry_fields(entry, holders, specs) for entry in self.entries]
        document = {
            "v": VERSION,
            "slabs": self.slab_sizes,
            "regions": [(r.slab, r.offset_bytes, r.size_bytes, int(r.shared)) for r in self.regions],
            "holders": [(holders.index(path[:-1]), _step_field(path[-1])) for path in holders.items[1:]],
            "specs": [_spec_fields(spec) for spec in specs.items],
            "entries": entries,
        }
        return json.dumps(document, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Layout:
    """Return the layout in these bytes only if all of this holds; PeerError on the first that does not.

    1. they are JSON of this version, within the limits above, every value of its type, no path twice
    2. regions are aligned, sorted, disjoint, each inside its slab
    3. every tensor's bytes, strides counted in, are inside its region, elements at multiples of their size
    4. aliases point backwards, at entries that are no aliases
    """
    document = _json(data)
    if type(document) is not dict or document.keys() != {"v", "slabs", "regions", "holders", "specs", "entries"}:
        raise PeerError("layout: not an object with v, slabs, regions, holders, specs and entries")
    if document["v"] != VERSION:
        raise PeerError(f"layout: version {str(document['v'])[:20]!r}, this process reads {VERSION}")
    slab_sizes = _slab_sizes(document["slabs"])
    regions = _regions(_list_of(document, "regions"), slab_sizes)
    holders = _holders(_list_of(document, "holders"))
    specs = [_spec(fields, index) for index, fields in enumerate(_list_of(document, "specs"))]
    return Layout(slab_sizes, regions, _entries(_list_of(document, "entries"), holders, specs, regions))


def shown(path: Path) -> str:
    """Return the path as Python writes it: `model.layers.0.scales['k'][1]`."""
    text = ""
    for step in path:
        if isinstance(step, str):
            text += f".{step}" if text else step
        else:
            text += f"[{step.value!r}]" if isinstance(step, Key) else f"[{step}]"
    return text


class _Table(Generic[_T]):
    """Numbers what it is asked for, in the order of the first asking; a path's own holder comes before it."""

    def __init__(self) -> None:
        self.items: list[_T] = []
        self._indices: dict[_T, int] = {}

    def index(self, item: _T) -> int:
        found = self._indices.get(item)
        if found is None:
            found = self._indices[item] = len(self.items)
            self.items.append(item)
        return found


def _entry_fields(entry: TensorEntry, holders: _Table[Path], specs: _Table[TensorSpec]) -> tuple[object, ...]:
    for length in range(1, len(entry.path)):
        holder = holders.index(entry.path[:length])
    holder = holders.index(entry.path[:-1])
    home = (holder, _step_field(entry.path[-1]), _KINDS.index(entry.kind), int(entry.persistent))
    if entry.alias is not None:
        return (*home, entry.alias)
    return (*home, specs.index(entry.spec), entry.region, entry.offset_bytes)


def _spec_fields(spec: TensorSpec) -> tuple[object, ...]:
    flags = spec.requires_grad | spec.conjugated << 1 | spec.negated << 2 | spec.on_host << 3
    return (spec.type_name, spec.dtype, spec.shape, spec.stride, flags)


def _step_field(step: Step) -> object:
    return [step.value] if isinstance(step, Key) else step


def _json(data: bytes) -> Any:
    if len(data) > LIMIT_BYTES:
        raise PeerError(f"layout: {len(data)} bytes, more than the {LIMIT_BYTES} allowed")
    try:
        return json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise PeerError(f"layout: not JSON: {str(error)[:80]}") from error


def _list_of(document: dict[str, Any], name: str) -> list[Any]:
    value = document[name]
    if type(value) is not list or len(value) > LIMIT_ENTRIES:
        raise PeerError(f"layout: {name}: not a list of at most {LIMIT_ENTRIES}")
    return value


def _slab_sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > LIMIT_SLABS or not all(map(_is_size, value)) or 0 in value:
        raise PeerError(f"layout: slabs: not a list of at most {LIMIT_SLABS} sizes")
    return tuple(value)


def _regions(value: list[Any], slab_sizes: tuple[int, ...]) -> tuple[Region, ...]:
    last_slab = last_end = 0
    for index, fields in enumerate(value):
        if type(fields) is not list or len(fields) != 4:
            raise _bad("region", index, "not four integers")
        slab, offset_bytes, size_bytes, shared = fields
        if not (type(slab) is type(offset_bytes) is type(size_bytes) is type(shared) is int):
            raise _bad("region", index, "not four integers")
        if not 0 <= slab < len(slab_sizes) or not 0 <= shared <= 1:
            raise _bad("region", index, "no such slab, or shared is neither 0 nor 1")
        end = offset_bytes + size_bytes
        if offset_bytes < 0 or size_bytes <= 0 or end > slab_sizes[slab] or offset_bytes % ALIGNMENT_BYTES:
            raise _bad("region", index, "empty, unaligned or outside of its slab")
        if slab < last_slab or (slab == last_slab and offset_bytes < last_end):
            raise _bad("region", index, "overlaps the one before it, or is out of order")
        last_slab, last_end = slab, end
        fields[3] = shared == 1
    return tuple(map(_new_region, value))


def _holders(value: list[Any]) -> list[Path]:
    """Return the path of every holder: the module itself first, then each a step below an earlier one."""
    holders: list[Path] = [()]
    names: set[str] = set()
    for index, fields in enumerate(value):
        if type(fields) is not list or len(fields) != 2 or type(fields[0]) is not int:
            raise _bad("holder", index, "not a holder and a step")
        if not 0 <= fields[0] < len(holders) or len(holders[fields[0]]) >= LIMIT_STEPS:
            raise _bad("holder", index, "it is below no earlier holder, or too deep")
        step = fields[1]
        if type(step) is not str or step not in names:
            step = _step(step, names, "holder", index)
        holders.append((*holders[fields[0]], step))
    return holders


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


def _entries(
    value: list[Any], holders: list[Path], specs: list[TensorSpec], regions: tuple[Region, ...]
) -> tuple[TensorEntry, ...]:
    extents = [(spec, spec.extent_bytes, spec.item_bytes) for spec in specs]
    entries: list[TensorEntry] = []
    names: set[str] = set()
    for index, fields in enumerate(value):
        if type(fields) is not list or len(fields) not in (5, 7):
            raise _bad("entry", index, "neither five nor seven fields")
        holder, step, kind, persistent = fields[:4]
        if type(holder) is not int or not 0 <= holder < len(holders):
            raise _bad("entry", index, "no such holder")
        # Most steps were good before: a call for each would take as long as all the rest.
        if type(step) is not str or step not in names:
            step = _step(step, names, "entry", index)
        if type(kind) is not int or not 0 <= kind < len(_KINDS) or (kind < 2 and type(step) is not str):
            raise _bad("entry", index, "unknown kind, or a parameter or buffer without a name")
        if type(persistent) is not int or persistent not in (0, 1):
            raise _bad("entry", index, "persistent is neither 0 nor 1")
        path = (*holders[holder], step)
        if len(fields) == 5:
            alias = fields[4]
            first = _first(alias, index, entries)
            spec, region, offset_bytes = first.spec, first.region, first.offset_bytes
        else:
            alias = None
            spec, region, offset_bytes = _placed(fields, index, extents, regions)
        entries.append(_new_entry((path, _KINDS[kind], persistent == 1, spec, region, offset_bytes, alias)))
    if len(set(map(_PATH, entries))) != len(entries):
        raise PeerError("layout: entries: the same path twice")
    return tuple(entries)


def _first(alias: Any, index: int, entries: list[TensorEntry]) -> TensorEntry:
    if type(alias) is not int or not 0 <= alias < index or entries[alias].alias is not None:
        raise _bad("entry", index, "its alias is no earlier entry with a tensor of its own")
    return entries[alias]


def _placed(
    fields: list[Any], index: int, extents: list[tuple[TensorSpec, int, int]], regions: tuple[Region, ...]
) -> tuple[TensorSpec, int | None, int]:
    """Return spec, region and offset, once the tensor's bytes are known to be inside the region."""
    _, _, _, _, spec_index, region, offset_bytes = fields
    if type(spec_index) is not int or not 0 <= spec_index < len(extents):
        raise _bad("entry", index, "no such spec")
    spec, extent_bytes, item_bytes = extents[spec_index]
    if type(offset_bytes) is not int or offset_bytes < 0 or offset_bytes % item_bytes:
        raise _bad("entry", index, "its offset is no multiple of its element's size")
    if region is None:
        if extent_bytes or offset_bytes:
            raise _bad("entry", index, "it has elements and no region")
    elif type(region) is not int or not 0 <= region < len(regions) or not extent_bytes:
        raise _bad("entry", index, "no such region, or nothing to find there")
    elif offset_bytes + extent_bytes > regions[region].size_bytes:
        raise _bad("entry", index, "outside of its region")
    return spec, region, offset_bytes


def _step(step: Any, names: set[str], what: str, index: int) -> Step:
    """Return the step; names that were good once are in `names`, as most repeat in every layer."""
    if type(step) is str and step in names:
        return step
    if _is_text(step):
        names.add(step)
        return step  # type: ignore[no-any-return]
    if _is_size(step):
        return step  # type: ignore[no-any-return]
    if type(step) is list and len(step) == 1 and (_is_text(step[0]) or _is_integer(step[0])):
        return Key(step[0])
    raise _bad(what, index, "its step is neither printable text, an index nor a key")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LIMIT_INTEGER


def _is_integer(value: Any) -> bool:
    return type(value) is int and -LIMIT_INTEGER <= value <= LIMIT_INTEGER


def _is_text(value: Any) -> bool:
    # A lone surrogate is not printable either: it would fail later, where a message is written.
    return type(value) is str and len(value) <= LIMIT_TEXT and value.isprintable()


def _bad(what: str, index: int, reason: str) -> PeerError:
    return PeerError(f"layout: {what} {index}: {reason}")
