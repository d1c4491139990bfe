"""Safetensors headers: read as the safetensors library reads them, or refused for a reason that is written down."""

import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

from appliance.checkpoint.header_text import MAX_DIMENSIONS
from appliance.checkpoint.safetensors import DTYPE_BITS, MAX_HEADER_BYTES, Header, parse_header, read_header
from appliance.errors import ConfigError
from tests.checkpoint.checkpoints import framed, header_text, noise

CASES = Path(__file__).parent.parent / "cases" / "checkpoint" / "headers"

Theirs = dict[str, tuple[str, tuple[int, ...], bytes]]

# Why we may refuse what the library reads: the list in the module's docstring.
STRICTER = (
    "an object expected",
    "dtype, shape or data_offsets expected",
    "twice",
    f"more than {MAX_DIMENSIONS} dimensions",
    "a dimension is 2**63 or more",
)


def ours(file: bytes) -> Theirs:
    header_bytes = int.from_bytes(file[:8], "little")
    header = parse_header(file[8 : 8 + header_bytes], file_bytes=len(file), what="it")
    return {tensor.name: (tensor.dtype, tensor.shape, file[tensor.begin : tensor.end]) for tensor in header.tensors}


def theirs(file: bytes) -> Theirs:
    return {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in deserialize(file)
    }


def agree(file: bytes) -> str:
    """Check that both read the same, or that whoever refuses alone may; return who read it."""
    try:
        their_reading = theirs(file)
    except safetensors.SafetensorError:
        with pytest.raises(ConfigError):
            ours(file)
        return "neither"
    try:
        our_reading = ours(file)
    except ConfigError as error:
        assert any(reason in error.message for reason in STRICTER), error.message
        return "theirs"
    assert our_reading == their_reading
    return "both"


deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


class TestFiles:
    def test_every_dtype_of_the_library_and_no_other(self) -> None:
        for dtype in [*DTYPE_BITS, "F8_E4M3FN", "C128", "I4", "u8", "", "F8_E4M3 "]:
            data = bytes(DTYPE_BITS.get(dtype, 8))
            file = framed(header_text({"a": (dtype, (8,), data)}), data)
            assert agree(file) == ("both" if dtype in DTYPE_BITS else "neither"), dtype

    def test_shapes_and_offsets_are_those_of_the_file(self, tmp_path: Path) -> None:
        tensors = {
            "b": ("F32", (2, 3), noise("b", 24)),
            "zero": ("I64", (5, 0, 2), b""),
            "scalar": ("BF16", (), noise("s", 2)),
            "a": ("F4", (3, 2), noise("a", 3)),
        }
        text = header_text(tensors, metadata={"format": "pt", "quote": '"\\\u00fc\n'})
        data = b"".join(data for _, _, data in tensors.values())
        (tmp_path / "file").write_bytes(framed(text, data))
        with (tmp_path / "file").open("rb") as file:
            header, consumed = read_header(file.fileno(), what="file")
        assert consumed == framed(text) and header.size_bytes == len(consumed)
        assert header.metadata == {"format": "pt", "quote": '"\\\u00fc\n'}
        whole = (tmp_path / "file").read_bytes()
        found = {t.name: (t.dtype, t.shape, whole[t.begin : t.end]) for t in header.tensors}
        assert found == tensors
        assert [tensor.name for tensor in header.tensors] == ["b", "zero", "scalar", "a"]
        assert header.tensors[0].size_bytes == 24

    def test_a_file_without_tensors_is_one(self) -> None:
        assert ours(framed(b"{}")) == theirs(framed(b"{}")) == {}
        assert ours(framed(b'{"__metadata__":{}}   ')) == {}

    @pytest.mark.parametrize(
        ("file", "reason"),
        [
            (b"", "0 bytes are too few"),
            (b"1234567", "7 bytes are too few"),
            (bytes(8), "not a safetensors header"),
            ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), f"{MAX_HEADER_BYTES} are allowed"),
            (b"\xff" * 8, "announces a header of 18446744073709551615 bytes"),
            (framed(b"{}")[:-1], "announces a header of 2 bytes and is only 9 long"),
        ],
    )
    def test_a_length_that_lies_is_refused_before_anything_is_allocated(
        self, tmp_path: Path, file: bytes, reason: str
    ) -> None:
        (tmp_path / "file").write_bytes(file)
        with (tmp_path / "file").open("rb") as opened, pytest.raises(ConfigError, match=f"name: .*{reason}"):
            read_header(opened.fileno(), what="name")

    def test_a_sparse_file_announcing_the_largest_header_costs_no_more_than_that(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes((50_000_000).to_bytes(8, "little"))
        os.truncate(path, 1 << 40)
        tracemalloc.start()
        try:
            with path.open("rb") as file, pytest.raises(ConfigError, match="an object expected"):
                read_header(file.fileno(), what="file")
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 60_000_000


@pytest.mark.parametrize("case", sorted(CASES.glob("*.txt")), ids=lambda path: path.stem)
def test_a_header_that_breaks_a_rule_is_refused_with_the_rule(case: Path) -> None:
    first, second, text = case.read_bytes().split(b"\n", 2)
    expected = first.decode().removeprefix("# expect: ")
    data_bytes = int(second.decode().removeprefix("# data: "))
    file = framed(text.removesuffix(b"\n"), bytes(data_bytes))
    if expected == "accepted":
        assert agree(file) == "both"
        return
    with pytest.raises(ConfigError) as caught:
        ours(file)
    assert expected in caught.value.message
    agree(file)


def test_there_are_header_cases() -> None:
    assert len(list(CASES.glob("*.txt"))) > 40


class TestFuzz:
    def test_bytes_damaged_at_random(self) -> None:
        randomness = random.Random(5)
        tensors = {
            "a": ("F32", (2, 3), noise("a", 24)),
            "b\u00fc\n": ("U8", (4,), b"1234"),
            "c": ("I64", (0,), b""),
            "d": ("F6_E2M3", (4,), b"123"),
        }
        good = framed(
            header_text(tensors, metadata={"format": "pt"}), b"".join(data for _, _, data in tensors.values())
        )
        readers = {"both": 0, "neither": 0, "theirs": 0}
        interesting = b'{}[]":,0123456789\\ntu+-.eE \t\n\r\x00\x7f\x80\xff_'
        for _ in range(6000):
            file = bytearray(good)
            for _ in range(randomness.choice((1, 1, 2, 3))):
                at = randomness.randrange(8, len(file))
                action = randomness.random()
                if action < 0.6:
                    file[at] = randomness.choice(interesting)
                elif action < 0.8:
                    del file[at]
                else:
                    file.insert(at, randomness.choice(interesting))
            if randomness.random() < 0.7:  # keep the length true, so that more than the length is tried
                grown = len(file) - len(good)
                file[:8] = (int.from_bytes(good[:8], "little") + grown).to_bytes(8, "little")
            readers[agree(bytes(file))] += 1
        assert min(readers["both"], readers["neither"]) > 200, readers

    def test_headers_made_of_odd_pieces(self) -> None:
        randomness = random.Random(6)
        numbers: list[Any] = [
            0,
            1,
            2,
            3,
            4,
            8,
            24,
            -1,
            1.0,
            1e2,
            2**31,
            2**62,
            2**63,
            2**64 - 1,
            2**64,
            10**30,
            None,
            "1",
            True,
        ]
        dtypes: list[Any] = ["U8", "F32", "F4", "BF16", "u8", "", None, 1, ["U8"], {"U8": None}]
        readers = {"both": 0, "neither": 0, "theirs": 0}
        for _ in range(4000):
            header: dict[str, Any] = {}
            position = 0
            for index in range(randomness.randint(0, 3)):
                shape = [randomness.randint(0, 3) for _ in range(randomness.randint(0, 3))]
                size = 1
                for length in shape:
                    size *= length
                tensor: dict[str, Any] = {"dtype": "U8", "shape": shape, "data_offsets": [position, position + size]}
                position += size
                if randomness.random() < 0.25:
                    field = randomness.choice(list(tensor))
                    if field == "dtype":
                        tensor[field] = randomness.choice(dtypes)
                    elif randomness.random() < 0.7:
                        tensor[field] = [randomness.choice(numbers) for _ in range(randomness.randint(0, 3))]
                    else:
                        tensor[field] = randomness.choice([*numbers, [], {}, [[1]]])
                if randomness.random() < 0.05:
                    tensor[randomness.choice(["x", "dtype "])] = 1
                if randomness.random() < 0.05:
                    del tensor[randomness.choice(list(tensor))]
                keys = list(tensor)
                randomness.shuffle(keys)
                header[randomness.choice(["t", "", "\u00fc", "a\\b", '"']) + str(index)] = {
                    key: tensor[key] for key in keys
                }
            if randomness.random() < 0.3:
                header["__metadata__"] = randomness.choice([{}, {"a": "b"}, {"a": 1}, {"a": None}, [], "x", {"a": {}}])
            indent = randomness.choice([None, 0, 1])
            text = json.dumps(header, indent=indent, ensure_ascii=randomness.random() < 0.5).encode()
            data = bytes(position + randomness.choice([0, 0, 0, 0, 1]))
            readers[agree(framed(text + b" " * randomness.randint(0, 9), data))] += 1
        assert min(readers.values()) > 30, readers

    def test_random_bytes(self) -> None:
        randomness = random.Random(7)
        for _ in range(1000):
            assert agree(framed(randomness.randbytes(randomness.randrange(60)), randomness.randbytes(9))) == "neither"


class TestLimits:
    @pytest.mark.parametrize(
        "text",
        [
            b'{"a":' + b"[" * 5_000_000,
            b'{"a":' + b'{"a":' * 1_000_000,
            b'{"' + b"\\" * 5_000_001,
            b'{"' + b"\\\\" * 2_500_000,
            b'{"' + b"x" * 5_000_000,
            b"{" + b" " * 5_000_000,
            b'{"a":{"shape":[' + b"1," * 2_500_000,
            b'{"a":{"shape":[' + b"1" * 5_000_000,
            b'{"a":{"shape":[1' + b" " * 5_000_000,
            b'{"__metadata__":{' + b'"a":"b",' * 600_000,
            b"{}" + b" " * 5_000_000 + b"x",
        ],
        ids=lambda text: repr(text[:20]),
    )
    def test_five_megabytes_of_malice_cost_little_time_and_memory(self, text: bytes) -> None:
        tracemalloc.start()
        begun = time.process_time()
        try:
            with pytest.raises(ConfigError):
                parse_header(text, file_bytes=8 + len(text), what="it")
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert time.process_time() - begun < 2
        assert peak_bytes < 4 * len(text)

    def test_twenty_thousand_tensors_take_a_moment(self) -> None:
        text = header_text({f"model.layers.{n}.weight": ("BF16", (2, 1), bytes(4)) for n in range(20_000)})
        begun = time.process_time()
        header: Header = parse_header(text, file_bytes=8 + len(text) + 80_000, what="it")
        assert len(header.tensors) == 20_000
        assert time.process_time() - begun < 2

    def test_messages_stay_short_whatever_the_names(self) -> None:
        long: Callable[[str], bytes] = lambda rest: b'{"' + b"n" * 100_000 + b'":' + rest.encode()  # noqa: E731
        for rest in (
            '{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}',
            '{"dtype":"XX","shape":[1],"data_offsets":[0,1]}}',
            '{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            '{"dtype":"U8","dtype":"U8","shape":[1]}}',
        ):
            with pytest.raises(ConfigError) as caught:
                ours(framed(long(rest), bytes(1)))
            assert len(caught.value.message) < 1000
