"""Which GPUs and package versions a host has, from files that anybody may read."""

from pathlib import Path

import pytest

from appliance import inventory
from appliance.errors import ConfigError, HostError
from appliance.gpus import GpuState, gpu_states
from tests.test_gpus import FakeNvml

CAPABILITIES_OF_1000 = ("-caps/nvidia-cap66", "-caps/nvidia-cap67")
UUIDS = ["GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"]


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Return a folder like /proc/driver/nvidia/gpus of a host with two GPUs."""
    for address, uuid in zip(("0000:41:00.0", "0000:c1:00.0"), UUIDS, strict=True):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 305\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.AF.00.01\n"
            f"Bus Location: \t {address}\nDevice Minor: \t 3\n"
        )
    return tmp_path


def test_gpus_are_counted_in_bus_order(driver: Path) -> None:
    assert inventory.gpus(driver) == [
        inventory.Gpu(0, UUIDS[0], "NVIDIA H200", 3),
        inventory.Gpu(1, UUIDS[1], "NVIDIA H200", 3),
    ]


def test_a_gpu_is_known_by_its_uuid_and_by_its_index_as_text(driver: Path) -> None:
    first, second = inventory.gpus(driver)
    names = {UUIDS[0]: first, UUIDS[1]: second, "0": first, "1": second}
    assert inventory.by_name([0, UUIDS[1]], folder=driver, states=not_asked) == names
    assert first.devices == {"/dev/nvidia3": "rw"}


def test_a_device_node_that_the_driver_does_not_number_is_that_of_the_index(driver: Path) -> None:
    path = driver / "0000:c1:00.0" / "information"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "Minor" not in line))
    assert [gpu.minor for gpu in inventory.gpus(driver)] == [3, 1]


def test_a_host_without_a_driver_has_none(tmp_path: Path) -> None:
    assert inventory.gpus(tmp_path / "missing") == []


def test_gpus_are_found_by_index_and_by_uuid(driver: Path) -> None:
    assert inventory.resolve([1, UUIDS[0]], folder=driver) == (UUIDS[1], UUIDS[0])
    assert inventory.resolve([], folder=driver) == ()


@pytest.mark.parametrize("name", [2, -1, "GPU-cccccccc", "0"])
def test_a_gpu_that_is_not_here_is_refused_and_those_that_are_here_are_named(driver: Path, name: int | str) -> None:
    with pytest.raises(ConfigError, match=f"GPU {name} is not on this host") as caught:
        inventory.resolve([name], folder=driver)
    assert all(uuid in str(caught.value.hint) for uuid in UUIDS)


@pytest.mark.parametrize("wanted", [[0, 0], [0, UUIDS[0]], [UUIDS[1], 0, 1]])
def test_a_gpu_named_twice_is_refused(driver: Path, wanted: list[int | str]) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        inventory.resolve(wanted, folder=driver)


def not_asked() -> tuple[GpuState, ...]:
    raise AssertionError


def divided() -> tuple[GpuState, ...]:
    return gpu_states(FakeNvml(nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetCount=1))


def test_a_part_of_a_gpu_goes_by_its_own_uuid(driver: Path) -> None:
    assert inventory.resolve(["MIG-1003", 0], folder=driver, states=divided) == ("MIG-1003", UUIDS[0])


def test_a_part_that_is_not_here_is_refused_and_those_that_are_here_are_named(driver: Path) -> None:
    with pytest.raises(ConfigError, match="MIG-1001 is no part of a GPU") as caught:
        inventory.resolve(["MIG-1001"], folder=driver, states=divided)
    assert caught.value.hint == "parts here: MIG-1000 (NVIDIA H200 MIG 1g.18gb), MIG-1003 (NVIDIA H200 MIG 1g.18gb)"
    with pytest.raises(ConfigError, match="named twice"):
        inventory.resolve(["MIG-1000", "MIG-1000"], folder=driver, states=divided)


def test_nvml_is_not_asked_where_no_part_is_wanted(driver: Path) -> None:
    assert inventory.resolve([0], folder=driver, states=not_asked) == (UUIDS[0],)


@pytest.fixture
def capabilities(driver: Path) -> Path:
    """Return a folder like /proc/driver/nvidia/capabilities, where GPU-100, of device node 3, has two parts."""
    path = driver / "0000:41:00.0" / "information"
    path.write_text(path.read_text().replace(UUIDS[0], "GPU-100"))
    folder = driver / "capabilities"
    for place, number in {"gi7": 66, "gi7/ci0": 67, "gi10": 93, "gi10/ci3": 97}.items():
        (folder / "gpu3" / "mig" / place).mkdir(parents=True)
        text = f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
        (folder / "gpu3" / "mig" / place / "access").write_text(text)
    return folder


def test_a_part_takes_the_node_of_its_gpu_and_those_of_its_instances(driver: Path, capabilities: Path) -> None:
    found = inventory.by_name(["MIG-1003"], folder=driver, capabilities=capabilities, states=divided)
    assert found["MIG-1003"].devices == {
        "/dev/nvidia3": "rw",
        "/dev/nvidia-caps/nvidia-cap93": "r",
        "/dev/nvidia-caps/nvidia-cap97": "r",
    }
    assert set(found["MIG-1000"].devices) == {f"/dev/nvidia{name}" for name in ("3", *CAPABILITIES_OF_1000)}
    assert found["0"].devices == {"/dev/nvidia3": "rw"}
    assert "MIG-1001" not in found


@pytest.mark.parametrize("text", [None, "", "DeviceFileMode: 292\n", "DeviceFileMinor: none\n"])
def test_a_part_whose_nodes_the_driver_does_not_tell_is_an_error_of_the_host(
    driver: Path, capabilities: Path, text: str | None
) -> None:
    path = capabilities / "gpu3/mig/gi10/ci3/access"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(HostError, match="ci3/access: does not say which device node opens MIG-1003"):
        inventory.by_name(["MIG-1003"], folder=driver, capabilities=capabilities, states=divided)


def test_a_host_without_gpus_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        inventory.resolve([0], folder=tmp_path)
    assert caught.value.hint == "GPUs here: none"


def test_a_driver_file_that_cannot_be_read_is_an_error_of_the_host(driver: Path) -> None:
    (driver / "0000:e1:00.0" / "information").mkdir(parents=True)
    with pytest.raises(HostError, match=r"cannot read .*e1:00\.0/information"):
        inventory.gpus(driver)


def test_versions_come_from_metadata_without_an_import() -> None:
    assert inventory.version("pytest") == pytest.__version__
    assert inventory.version("surely-not-installed") == inventory.ABSENT
