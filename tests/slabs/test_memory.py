"""How much memory there is, as the kernel's files tell it."""

from pathlib import Path

import pytest

from appliance.errors import HostError
from appliance.slabs.memory import available_bytes

GIB_KB = 1 << 20


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(f"MemTotal: {9 * GIB_KB} kB\nMemAvailable:    {8 * GIB_KB} kB\n")
    (tmp_path / "own").write_text("4:memory:/old\n0::/system.slice/weights@m.service\n")
    (tmp_path / "groups/system.slice/weights@m.service").mkdir(parents=True)
    return tmp_path


def _available(host: Path) -> int:
    return available_bytes(meminfo=host / "meminfo", own_group=host / "own", groups=host / "groups")


def _limit(group: Path, limit: str, used_gib: int, reclaimable_gib: int) -> None:
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used_gib << 30}\n")
    stat = f"anon 1\ninactive_file {reclaimable_gib << 30}\nslab_reclaimable 4096\n"
    (group / "memory.stat").write_text(stat)


def test_without_limits_it_is_the_machines(host: Path) -> None:
    assert _available(host) == 8 << 30


def test_a_group_without_a_limit_changes_nothing(host: Path) -> None:
    _limit(host / "groups/system.slice", "max", 1, 1)
    assert _available(host) == 8 << 30


@pytest.mark.parametrize("group", ["system.slice", "system.slice/weights@m.service"])
def test_the_limit_of_each_group_above_counts(host: Path, group: str) -> None:
    _limit(host / "groups" / group, str(5 << 30), used_gib=4, reclaimable_gib=2)
    assert _available(host) == (3 << 30) + 4096


def test_a_limit_above_what_the_machine_has_does_not_count(host: Path) -> None:
    _limit(host / "groups/system.slice", str(50 << 30), used_gib=1, reclaimable_gib=0)
    assert _available(host) == 8 << 30


def test_a_group_over_its_limit_leaves_nothing(host: Path) -> None:
    _limit(host / "groups/system.slice", str(1 << 30), used_gib=4, reclaimable_gib=0)
    assert _available(host) == 0


def test_a_host_without_control_groups_is_a_host(host: Path) -> None:
    (host / "own").unlink()
    assert _available(host) == 8 << 30


@pytest.mark.parametrize("text", ["", "MemTotal: 1 kB\n", "MemAvailable:\n", "MemAvailable: much kB\n"])
def test_a_kernel_that_does_not_tell_is_an_error(host: Path, text: str) -> None:
    (host / "meminfo").write_text(text)
    with pytest.raises(HostError, match="meminfo"):
        _available(host)


def test_the_real_one_is_between_nothing_and_everything() -> None:
    assert 0 < available_bytes() < 1 << 50
