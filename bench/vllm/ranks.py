"""Whether each rank's attached tensors are those on disk, in layouts of a mixture of experts; nothing is computed.

    python -m bench.vllm.ranks [--architecture qwen3-moe] [--tensor 1] [--data 2] [--expert 2]

Runs on a CPU, whose vLLM loads such layouts and cannot compute with them. A real keeper and its loader fill the slots;
then executors of vLLM attach them, one for each replica, and each rank compares with what it loads from disk. One line
of JSON for each shard; the exit status is the number of shards that differ.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from appliance.vllm import loading
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.comparison import EXTENSION, Compared
from appliance.vllm.environment import environment
from appliance.vllm.replicas import become_replica
from bench.vllm.rows import CPU_ENVIRONMENT
from tests.sites import MODEL, Site
from tests.vllm.checkpoints import make_checkpoint

RESIDENT_TIMEOUT_S = 400.0


def compared(vllm_config: Any, index: int) -> list[Compared]:
    """Return how the shards of one replica compare; for a process of its own."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor import Executor

    if vllm_config.parallel_config.data_parallel_size > 1:
        become_replica(vllm_config, index)
    load_general_plugins()
    executor = Executor.get_class(vllm_config)(vllm_config)
    try:
        return [shard for shards in executor.collective_rpc("appliance_compare") for shard in shards]
    finally:
        executor.shutdown()


def measure(folder: Path, *, architecture: str, tensor: int, data: int, expert: int) -> list[Compared]:
    """Return how every shard of a layout compares."""
    engine = {
        "kind": "vllm",
        "port": 18000,
        "args": ["--max-model-len", "256", "--enforce-eager"],
        "environment": CPU_ENVIRONMENT,
    }
    site = Site(
        folder / "site",
        make_checkpoint(folder / "made", architecture=architecture),
        engine=engine,
        parallel={"tensor": tensor, "data": data, "expert": expert},
        wait=RESIDENT_TIMEOUT_S,
    )
    argv = [sys.executable, "-m", "appliance.keeper", "--manifest", str(site.manifest), "--model", MODEL]
    keeper = subprocess.Popen(argv, stdout=sys.stderr)
    try:
        with site.client() as client:
            for rank in range(tensor * data):
                client.describe(role="target", rank=rank, wait_s=RESIDENT_TIMEOUT_S).configs.close()
        target = site.target()
        os.environ.update(environment(target, site.manifest))
        served = serve_arguments(MODEL, target.model, configs=target.identity.root.path)
        # One for all: replicas find each other by it.
        vllm_config = loading.engine_config([*served, *EXTENSION])
        with ProcessPoolExecutor(data, mp_context=get_context("spawn")) as pool:
            replicas = [pool.submit(compared, vllm_config, index) for index in range(data)]
            return [shard for replica in replicas for shard in replica.result()]
    finally:
        keeper.send_signal(signal.SIGTERM)
        keeper.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="qwen3-moe")
    for name, default in (("tensor", 1), ("data", 2), ("expert", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args(arguments))
    with tempfile.TemporaryDirectory() as folder:
        shards = measure(Path(folder), **given)
    for shard in shards:
        print(json.dumps(dataclasses.asdict(shard)), flush=True)
    return sum(bool(shard.differing) for shard in shards)


if __name__ == "__main__":
    sys.exit(main())
