"""Who holds a GPU's memory, from what keepers and NVML tell; and what an operator is shown of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from rich.console import Console

from appliance import gpus
from appliance.cli import status as command
from appliance.errors import HostError
from appliance.gpus import gpu_states
from appliance.tenants import tenancies
from tests.test_gpus import GIB, FakeNvml


def keeper(*shards: tuple[str, int], pids: tuple[int, ...] = (), loaders: tuple[int, ...] = ()) -> dict[str, Any]:
    return {
        "shards": [{"device": device, "size_bytes": size_bytes} for device, size_bytes in shards],
        "leases": [{"pid": pid, "client": f"engine@{pid}"} for pid in pids],
        "loaders": [{"pid": pid, "client": f"loader@{pid}"} for pid in loaders],
    }


def test_memory_is_told_apart_by_who_holds_it() -> None:
    keepers = {"a": keeper(("GPU-100", 5 * GIB), ("GPU-101", GIB), pids=(42,)), "b": keeper(("GPU-100", 7 * GIB))}
    first, second = tenancies(gpu_states(FakeNvml()), keepers)
    assert first.kept_bytes == {"a": 5 * GIB, "b": 7 * GIB}
    assert second.kept_bytes == {"a": GIB}
    assert [(one.name, one.pid, one.used_bytes) for one in first.engines] == [("engine@42", 42, 8 * GIB)]
    assert [(one.pid, one.used_bytes) for one in first.strangers] == [(7, 2 * GIB)]
    # 30 GiB are in use: 12 kept, 10 by processes.
    assert first.other_bytes == 8 * GIB


def test_a_process_that_fills_a_slot_is_no_stranger() -> None:
    [tenancy, _] = tenancies(gpu_states(FakeNvml()), {"a": keeper(loaders=(7, 8))})
    assert [(one.name, one.pid, one.used_bytes) for one in tenancy.loaders] == [("loader@7", 7, 2 * GIB)]
    assert [one.pid for one in tenancy.strangers] == [42]
    assert tenancy.to_json()["loaders"] == [{"name": "loader@7", "pid": 7, "used_bytes": 2 * GIB}]


def test_a_process_that_fills_one_slot_and_leases_another_is_an_engine() -> None:
    [tenancy, _] = tenancies(gpu_states(FakeNvml()), {"a": keeper(pids=(7,), loaders=(7,))})
    assert ([one.pid for one in tenancy.engines], tenancy.loaders) == ([7], ())


def test_a_keeper_of_an_older_release_tells_of_no_loaders() -> None:
    older = keeper(pids=(7,))
    del older["loaders"]
    [tenancy, _] = tenancies(gpu_states(FakeNvml()), {"a": older})
    assert [one.pid for one in tenancy.strangers] == [42]


def test_what_is_kept_on_a_part_is_kept_on_its_gpu() -> None:
    states = gpu_states(FakeNvml(nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetCount=1))
    [tenancy] = tenancies(states, {"a": keeper(("MIG-1003", GIB), ("MIG-0", GIB), ("cpu", GIB))})
    assert tenancy.kept_bytes == {"a": GIB}


def test_a_process_whose_memory_is_not_told_leaves_the_rest_unknown() -> None:
    processes = [SimpleNamespace(pid=42, usedGpuMemory=None)]
    states = gpu_states(FakeNvml(nvmlDeviceGetComputeRunningProcesses=processes))
    tenancy = tenancies(states, {})[0]
    assert tenancy.other_bytes is None
    assert tenancy.to_json()["strangers"] == [{"name": "", "pid": 42, "used_bytes": None}]


def shown(found: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(command._view(found))
    return console.export_text()


@pytest.fixture
def manifest(tmp_path: Path) -> Any:
    return SimpleNamespace(models={"m": None}, socket_path=lambda name: tmp_path / "keeper.sock")


def test_the_status_lists_each_gpu(monkeypatch: pytest.MonkeyPatch, manifest: Any) -> None:
    monkeypatch.setattr(gpus, "_load_nvml", FakeNvml)
    loading = {"state": "loading", "size_bytes": 0, "verdicts": []} | keeper(loaders=(7,))
    monkeypatch.setattr(command, "_ask", lambda path: loading)
    found = command.gather(manifest)
    json.dumps(found)
    assert (len(found["gpus"]), found["gpus_unknown"]) == (2, "")
    text = shown(found)
    for words in ("GPU", "0 (NVIDIA H200)", "109 GiB", "140 GiB", "loader@7 (pid 7) 2 GiB", "(pid 42) 8 GiB", "20 GiB"):
        assert words in text


def test_without_nvml_the_status_has_no_gpus_and_says_why(monkeypatch: pytest.MonkeyPatch, manifest: Any) -> None:
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    monkeypatch.setattr(gpus, "_load_nvml", lambda: FakeNvml(nvmlInit=lost))
    found = command.gather(manifest)
    assert found["gpus"] is None
    assert "GPU is lost" in found["gpus_unknown"]
    assert "STRANGERS" not in shown(found)
    with pytest.raises(HostError):
        gpu_states()
