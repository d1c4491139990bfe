"""What makes a process one of a model's data-parallel replicas."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import ResourceError
from appliance.vllm.replicas import become_replica, in_processes, take_part

GPUS = "GPU-0,GPU-1,GPU-2,GPU-3"


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SIZE", "RANK", "RANK_LOCAL", "MASTER_IP", "MASTER_PORT"):
        monkeypatch.setenv(f"VLLM_DP_{name}", "of before")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS)


def config(*, is_moe: bool) -> Any:
    parallel = SimpleNamespace(data_parallel_size=2, data_parallel_size_local=2, data_parallel_rank=0)
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=is_moe))


@pytest.mark.parametrize(("is_moe", "size", "rank"), [(False, 1, 0), (True, 2, 1)])
def test_a_dense_replica_is_an_engine_of_its_own_and_one_of_experts_is_not(is_moe: bool, size: int, rank: int) -> None:
    become_replica(made := config(is_moe=is_moe), 1)
    parallel = made.parallel_config
    assert (parallel.data_parallel_size, parallel.data_parallel_rank) == (size, rank)
    assert (parallel.data_parallel_index, parallel.data_parallel_rank_local) == (1, 1)


def test_it_sees_every_gpu_as_vllm_counts_from_the_first() -> None:
    become_replica(config(is_moe=False), 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == GPUS


@pytest.mark.parametrize(("is_moe", "size"), [(False, "1"), (True, "2")])
def test_an_engine_that_is_yet_to_be_configured_is_told_by_the_environment(is_moe: bool, size: str) -> None:
    assert take_part(config(is_moe=is_moe), 1, port=29000) == ["--data-parallel-size", "1"]
    found = {name.removeprefix("VLLM_DP_"): value for name, value in os.environ.items() if name.startswith("VLLM_DP_")}
    assert found == {"SIZE": size, "RANK": "1", "RANK_LOCAL": "1", "MASTER_IP": "127.0.0.1", "MASTER_PORT": "29000"}


def write(folder: Path, index: int) -> None:
    (folder / str(index)).touch()


def fail_second(index: int) -> None:
    if index == 1:
        sys.exit(3)
    time.sleep(600)


def test_each_has_a_process_of_its_own(tmp_path: Path) -> None:
    in_processes(partial(write, tmp_path), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.timeout(60)
def test_none_waits_for_one_that_failed() -> None:
    with pytest.raises(ResourceError, match="replica 1 failed"):
        in_processes(fail_second, 3)
