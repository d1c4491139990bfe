"""A checkpoint's configs in one memory file: what is packed comes out, and hostile files are refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import configs, memfd
from appliance.errors import HostError, PeerError

_NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(_PATHS, st.binary(max_size=40), max_size=5))
def test_packed_configs_come_out_as_they_were(files: dict[str, bytes]) -> None:
    with configs.pack(files) as packed:
        assert configs.unpack(packed) == files
        assert memfd.is_sealed(packed.fileno())


def test_configs_are_written_where_they_were(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "tokenizer/vocab.txt": b"a\nb\n", "empty": b""}
    configs.write(files, tmp_path)
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == files


def test_a_folder_that_cannot_be_written_is_an_error_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HostError, match="cannot write configs"):
        configs.write({"a": b""}, tmp_path / "file")


def test_files_that_are_folders_of_one_another_are_an_error_of_the_host(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot write configs"):
        configs.write({"a": b"", "a/b": b""}, tmp_path)


def unpacked(data: bytes) -> dict[str, bytes]:
    with memfd.sealed("configs", [data]) as packed:
        return configs.unpack(packed)


def indexed(*items: object, body: bytes = b"") -> bytes:
    return json.dumps(items).encode() + b"\n" + body


REFUSED = {
    "nothing": b"",
    "no newline": b"[]",
    "not JSON": b"[\n",
    "not a list": b"{}\n",
    "null": b"null\n",
    "UTF-16": "[]".encode("utf-16-le") + b"\n",
    "deep nesting": b"[" * 100_000 + b"\n",
    "an entry that is a path": indexed("a"),
    "an entry of three": indexed(["a", 0, 0]),
    "a path that is a number": indexed([1, 0]),
    "a size that is text": indexed(["a", "0"]),
    "a size that is true": indexed(["a", True], body=b"b"),
    "a negative size": indexed(["a", -1]),
    "a size beyond the end": indexed(["a", 2], body=b"b"),
    "a size beyond all memory": indexed(["a", 10**30], body=b"b"),
    "bytes beyond the last file": indexed(["a", 1], body=b"bc"),
    "one path twice": indexed(["a", 1], ["a", 1], body=b"bc"),
    "an absolute path": indexed(["/etc/passwd", 0]),
    "a path that climbs out": indexed(["../a", 0]),
    "a path that climbs out later": indexed(["a/../../b", 0]),
    "the folder itself": indexed([".", 0]),
    "an empty path": indexed(["", 0]),
    "a path with a dot": indexed(["./a", 0]),
    "a path with an empty name": indexed(["a//b", 0]),
    "a path with a slash at its end": indexed(["a/", 0]),
    "a path with NUL": indexed(["a\0b", 0]),
    "a path of two lines": indexed(["a\nb", 0]),
    "a path that is half a surrogate pair": indexed(["\ud800", 0]),
    "too many files": indexed(*([str(number), 0] for number in range(configs.MAX_FILES + 1))),
    "an index that does not end": b" " * (configs.MAX_INDEX_BYTES + 1),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_pack_would_not_make_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="configs") as caught:
        unpacked(data)
    assert len(str(caught.value)) < 200


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(PeerError):
        unpacked(b"[" + data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_damaged_byte_gives_configs_or_a_refusal(data: st.DataObject) -> None:
    with configs.pack({"config.json": b"{}", "a/b": b"text"}) as packed:
        damaged = bytearray(memfd.read(packed, what="configs", limit_bytes=1000))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        files = unpacked(bytes(damaged))
    except PeerError:
        return
    assert all(not Path(path).is_absolute() and ".." not in Path(path).parts for path in files)


def test_configs_that_could_still_change_are_refused() -> None:
    with memfd.create("configs") as packed, pytest.raises(PeerError, match="not a sealed memory file"):
        configs.unpack(packed)


def test_configs_larger_than_allowed_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "MAX_BYTES", 10)
    with pytest.raises(PeerError, match="more than the 10 allowed"):
        unpacked(indexed(["a", 10], body=b"0123456789"))
