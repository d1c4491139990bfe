"""Data-parallel replicas: what makes a process and its configuration one of them, as vLLM's own engine cores do it.

Dense replicas are engines of their own, which know nothing of each other; those of a mixture of experts are one group.
All of them see every GPU of the model: vLLM's worker takes its own by the replica's index.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from appliance.errors import ResourceError
from appliance.ports import LOOPBACK


def become_replica(vllm_config: Any, index: int) -> None:
    """Make a configuration that of one replica."""
    parallel = vllm_config.parallel_config
    parallel.data_parallel_index = parallel.data_parallel_rank_local = index
    if vllm_config.model_config.is_moe:
        parallel.data_parallel_rank = index
    else:
        parallel.data_parallel_size = parallel.data_parallel_size_local = 1
        parallel.data_parallel_rank = 0


def take_part(vllm_config: Any, index: int, *, port: int) -> list[str]:
    """Make every engine of this process, whose own configuration is not made yet, one replica of this one.

    Return the arguments to end `vllm serve`'s with. `port` is where the replicas of a mixture of experts meet.
    """
    replicas = vllm_config.parallel_config.data_parallel_size if vllm_config.model_config.is_moe else 1
    os.environ.update(
        VLLM_DP_SIZE=str(replicas),
        VLLM_DP_RANK=str(index),
        VLLM_DP_RANK_LOCAL=str(index),
        VLLM_DP_MASTER_IP=LOOPBACK,
        VLLM_DP_MASTER_PORT=str(port),
    )
    # Of one replica vLLM asks the environment.
    return ["--data-parallel-size", "1"]


def in_processes(act: Callable[[int], None], count: int) -> None:
    """Have each of so many processes act on its index; ResourceError where one fails, which ends the others.

    Replicas of a mixture of experts wait for each other, and would do so for ever.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=act, args=(index,)) for index in range(count)]
    for process in processes:
        process.start()
    alive, failed = processes, None
    while alive:
        connection.wait([process.sentinel for process in alive])
        alive = [process for process in alive if process.is_alive()]
        if failed is None:
            failed = next((index for index, process in enumerate(processes) if process.exitcode), None)
            if failed is not None:
                for process in alive:
                    process.terminate()
    if failed is not None:
        raise ResourceError(f"vLLM's executor of replica {failed} failed", hint="see its messages above")
