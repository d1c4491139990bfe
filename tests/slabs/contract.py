"""What every slab backend promises, as tests: run on sealed memfds, on CUDA without a GPU, and on a GPU.

A backend joins by a subclass with a `lab` fixture.
"""

import fcntl
import gc
import hashlib
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.descriptors import Descriptor
from appliance.errors import HostError, PeerError, ResourceError
from appliance.slabs.interface import Backend, Mapping

REPOSITORY = Path(__file__).resolve().parents[2]


class Lab(ABC):
    """A backend, and how a test gets at the bytes of its windows. `kind` is what `tests.slabs.visitor` calls it."""

    kind: str
    backend: Backend

    @abstractmethod
    def write(self, window: Any, data: bytes) -> None: ...

    @abstractmethod
    def read(self, window: Any) -> bytes: ...

    @property
    def size_bytes(self) -> int:
        """Return the size of a small slab."""
        return 2 * self.backend.granularity_bytes

    def slab(self, data: bytes) -> Descriptor:
        """Return a sealed small slab that begins with these bytes. The caller closes it."""
        with self.backend.create("test", self.size_bytes) as slab:
            self.write(slab.window(0, len(data)), data)
            return slab.seal()

    def visit(self, descriptor: Descriptor, act: str) -> "subprocess.CompletedProcess[str]":
        """Have another process map the slab and `read` it all or `write` its first byte."""
        argv = [sys.executable, "-m", "tests.slabs.visitor", self.kind, self.backend.device]
        argv += [str(descriptor.fileno()), str(self.size_bytes), act]
        return subprocess.run(
            argv,
            check=False,
            pass_fds=[descriptor.fileno()],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=120,
        )


class BackendContract:
    """The tests; `lab` is the backend's."""

    @pytest.fixture(autouse=True)
    def _nothing_waits_for_the_collector(self) -> Iterator[None]:
        # What a test drops has to be free at once, not at the collector's next run.
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    def test_what_was_written_is_what_is_mapped(self, lab: Lab) -> None:
        data = os.urandom(5000)
        with lab.slab(data) as descriptor, lab.backend.map(descriptor, lab.size_bytes) as mapping:
            assert (mapping.device, mapping.size_bytes) == (lab.backend.device, lab.size_bytes)
            assert lab.read(mapping.window(0, 5000)) == data
            assert lab.read(mapping.window(1000, 7)) == data[1000:1007]

    def test_a_new_slab_is_zero(self, lab: Lab) -> None:
        with lab.slab(b"") as descriptor, lab.backend.map(descriptor, lab.size_bytes) as mapping:
            assert not any(lab.read(mapping.window(0, lab.size_bytes)))

    def test_the_last_byte_can_be_written_and_read(self, lab: Lab) -> None:
        with lab.backend.create("test", lab.size_bytes) as slab:
            lab.write(slab.window(lab.size_bytes - 1, 1), b"x")
            with slab.seal() as descriptor, lab.backend.map(descriptor, lab.size_bytes) as mapping:
                assert lab.read(mapping.window(lab.size_bytes - 1, 1)) == b"x"

    def test_another_process_reads_the_same_bytes(self, lab: Lab) -> None:
        data = os.urandom(5000)
        with lab.slab(data) as descriptor:
            visited = lab.visit(descriptor, "read")
        expected = hashlib.sha256(data.ljust(lab.size_bytes, b"\0")).hexdigest()
        assert (visited.returncode, visited.stdout.strip()) == (0, expected), visited.stderr

    def test_a_write_to_a_mapping_ends_its_process_and_leaves_the_bytes(self, lab: Lab) -> None:
        with lab.slab(b"weights") as descriptor:
            visited = lab.visit(descriptor, "write")
            assert visited.returncode != 0
            assert "written" not in visited.stdout
            with lab.backend.map(descriptor, lab.size_bytes) as mapping:
                assert lab.read(mapping.window(0, 7)) == b"weights"

    def test_slabs_of_a_shard_are_mapped_in_their_order(self, lab: Lab) -> None:
        with lab.slab(b"one") as first, lab.slab(b"other") as second:
            mappings = lab.backend.map_all([first, second], [lab.size_bytes, lab.size_bytes])
        assert [lab.read(mapping.window(0, 3)) for mapping in mappings] == [b"one", b"oth"]
        for mapping in mappings:
            mapping.close()

    def test_where_one_slab_of_a_shard_is_refused_none_stays_mapped(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = []
        kind = type(lab.backend)

        def noted(backend: Any, descriptor: Descriptor, size_bytes: int, *, map_one: Any = kind.map) -> Mapping:
            made.append(mapping := map_one(backend, descriptor, size_bytes))
            return cast("Mapping", mapping)

        monkeypatch.setattr(kind, "map", noted)
        with lab.slab(b"one") as first, lab.slab(b"other") as second:
            with pytest.raises(PeerError, match="slab"):
                lab.backend.map_all([first, second], [lab.size_bytes, 2 * lab.size_bytes])
            assert not first.closed
        assert [mapping.mapped for mapping in made] == [False]

    def test_fewer_or_more_slabs_than_announced_are_refused(self, lab: Lab) -> None:
        with lab.slab(b"one") as slab:
            for slabs, sizes in (([slab], []), ([slab], [lab.size_bytes] * 2), ([], [lab.size_bytes])):
                with pytest.raises(PeerError, match="slabs instead of"):
                    lab.backend.map_all(slabs, sizes)
        assert lab.backend.map_all([], []) == []

    def test_mappings_of_one_slab_are_independent(self, lab: Lab) -> None:
        with lab.slab(b"weights") as descriptor:
            first = lab.backend.map(descriptor, lab.size_bytes)
            second = lab.backend.map(descriptor, lab.size_bytes)
            first.close()
            assert lab.read(second.window(0, 7)) == b"weights"
            second.close()
            assert not first.mapped
            assert not second.mapped

    def test_a_mapping_outlives_the_descriptor(self, lab: Lab) -> None:
        descriptor = lab.slab(b"weights")
        with lab.backend.map(descriptor, lab.size_bytes) as mapping:
            descriptor.close()
            assert lab.read(mapping.window(0, 7)) == b"weights"

    def test_a_closed_mapping_stays_until_its_last_window_is_gone(self, lab: Lab) -> None:
        with lab.slab(b"weights") as descriptor:
            mapping = lab.backend.map(descriptor, lab.size_bytes)
        first, second = mapping.window(0, 7), mapping.window(2, 3)
        mapping.close()
        mapping.close()
        assert mapping.mapped
        assert lab.read(first) == b"weights"
        del first
        assert mapping.mapped
        assert lab.read(second) == b"igh"
        del second
        assert not mapping.mapped

    def test_a_slab_is_not_sealed_under_a_window(self, lab: Lab) -> None:
        with lab.backend.create("test", lab.size_bytes) as slab:
            window = slab.window(0, 7)
            lab.write(window, b"weights")
            with pytest.raises(HostError, match="still holds"):
                slab.seal()
            del window
            with slab.seal() as descriptor, lab.backend.map(descriptor, lab.size_bytes) as mapping:
                assert lab.read(mapping.window(0, 7)) == b"weights"

    def test_nobody_inherits_a_slab_by_accident(self, lab: Lab) -> None:
        with lab.slab(b"weights") as descriptor:
            assert fcntl.fcntl(descriptor.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC

    def test_after_seal_the_slab_has_no_window_and_nothing_to_seal(self, lab: Lab) -> None:
        with lab.backend.create("test", lab.size_bytes) as slab:
            slab.seal().close()
            with pytest.raises(ValueError, match="slab is closed"):
                slab.window(0, 1)
            with pytest.raises(ValueError, match="slab is closed"):
                slab.seal()

    def test_a_closed_slab_is_closed(self, lab: Lab) -> None:
        slab = lab.backend.create("test", lab.size_bytes)
        slab.close()
        slab.close()
        with pytest.raises(ValueError, match="slab is closed"):
            slab.window(0, 1)
        with pytest.raises(ValueError, match="slab is closed"):
            slab.seal()

    def test_a_closed_mapping_has_no_window(self, lab: Lab) -> None:
        with lab.slab(b"weights") as descriptor:
            mapping = lab.backend.map(descriptor, lab.size_bytes)
        mapping.close()
        with pytest.raises(ValueError, match="slab is closed"):
            mapping.window(0, 1)

    @pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, -1), (1, 0), (0, 1)], ids=str)
    def test_a_window_is_inside_of_its_slab(self, lab: Lab, offset: int, size: int) -> None:
        beyond = lab.size_bytes if offset >= 0 and size >= 0 else 0
        with lab.slab(b"") as descriptor, lab.backend.map(descriptor, lab.size_bytes) as mapping:
            for window in (mapping.window, lab.backend.create("test", lab.size_bytes).window):
                with pytest.raises(ValueError, match="not inside"):
                    window(offset + beyond, size)

    @pytest.mark.parametrize("change", ["zero", "negative", "unaligned"])
    def test_the_size_is_a_positive_multiple_of_the_granularity(self, lab: Lab, change: str) -> None:
        size_bytes = {"zero": 0, "negative": -lab.size_bytes, "unaligned": lab.size_bytes + 512}[change]
        with pytest.raises(ValueError, match="multiple"):
            lab.backend.create("test", size_bytes)

    def test_more_than_there_is_is_refused_and_costs_nothing(self, lab: Lab) -> None:
        with pytest.raises(ResourceError, match="wanted"):
            lab.backend.create("test", 1 << 50)
        lab.slab(b"weights").close()

    def test_a_smaller_slab_than_announced_is_refused(self, lab: Lab) -> None:
        with lab.slab(b"weights") as descriptor:
            with pytest.raises(PeerError, match="slab"):
                lab.backend.map(descriptor, 2 * lab.size_bytes)
            assert not descriptor.closed
            lab.backend.map(descriptor, lab.size_bytes).close()

    @pytest.mark.parametrize("kind", ["null", "pipe", "file", "memfd", "socket"])
    def test_what_is_no_slab_is_refused(self, lab: Lab, kind: str, tmp_path: Path) -> None:
        with _foreign(kind, tmp_path, size_bytes=lab.size_bytes) as descriptor:
            with pytest.raises(PeerError, match="slab"):
                lab.backend.map(descriptor, lab.size_bytes)
            assert not descriptor.closed


def _foreign(kind: str, folder: Path, *, size_bytes: int) -> Descriptor:
    if kind == "null":
        return Descriptor(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
    if kind == "pipe":
        reading, writing = os.pipe()
        os.close(writing)
        return Descriptor(reading)
    if kind == "socket":
        import socket

        return Descriptor(socket.socket(socket.AF_UNIX).detach())
    if kind == "file":
        fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    else:
        fd = os.memfd_create("foreign")
    os.truncate(fd, size_bytes)
    return Descriptor(fd)
