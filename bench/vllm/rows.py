"""Parity of attached weights, one row for each architecture and method, several rows at a time.

    python -m bench.vllm.rows --out DIR [--jobs N] [--gpus N] [--control [N]] [--environment NAME=VALUE] [ROW...]

Each row is a real keeper, its loader, and `python -m appliance.vllm.parity`, on what a second keeper was given back
after the one that the weights were donated to was killed. DIR gets rows.jsonl and a log for each. The exit status is
the number of rows that do not hold.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from appliance.vllm.parity_result import Parity
from tests.keeper.process import KeeperProcess
from tests.service_manager import ServiceManager
from tests.sites import MODEL, Site
from tests.vllm.checkpoints import make_checkpoint
from tests.vllm.drafts import add_draft

RESIDENT_TIMEOUT_S = 240.0
PARITY_TIMEOUT_S = 400.0
CONTROL_TIMEOUT_S = 120.0
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Not profiled: rows that come and go beside each other would disturb it.
GPU_ARGUMENTS = ("--kv-cache-memory-bytes", "500000000", "--gpu-memory-utilization", "0.05")
# FlashInfer's sampler is compiled for minutes at the first start, and these rows are greedy; so are DeepGEMM's kernels
# for every size of a batch, where a prompt needs a few.
GPU_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
GPU_GRAPHS = ("--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4]}')
SEVERAL_RANKS = ("--enforce-eager", "--disable-custom-all-reduce")


@dataclass(frozen=True)
class Row:
    """One model: its architecture, its quantization method, further arguments of vLLM, ranks, how it speculates."""

    architecture: str
    method: str | None = None
    arguments: tuple[str, ...] = ()
    tensor: int = 1
    dtype: str = "auto"
    expert: int = 1
    draft: str = ""
    data: int = 1

    @property
    def name(self) -> str:
        extra = "".join(part.strip("-").replace("/", "-") for part in self.arguments[:2])
        ranks = {"tp": self.tensor, "ep": self.expert, "dp": self.data}
        layout = (f"{name}{number}" for name, number in ranks.items() if number > 1)
        return ".".join(part for part in (self.architecture, self.method, *layout, self.draft, extra) if part)

    @property
    def ranks(self) -> int:
        return self.tensor * self.data


ROWS = (
    Row("qwen3"),
    Row("llama"),
    Row("qwen3-moe"),
    Row("mixtral"),
    Row("deepseek-v3"),
    Row("gemma3"),
    Row("gpt-oss"),
    Row("qwen3", "fp8"),
    Row("qwen3", "fp8-block"),
    Row("qwen3", "fp8", ("--kv-cache-dtype", "fp8")),
    Row("qwen3-moe", "fp8"),
    Row("qwen3-moe", "fp8-block"),
    Row("deepseek-v3", "fp8-block"),
    Row("qwen3-moe", "compressed-tensors-fp8"),
    Row("qwen3-moe", "awq", dtype="float16"),
    Row("qwen3-moe", "gptq", dtype="float16"),
    Row("qwen3", "compressed-tensors-fp8"),
    Row("qwen3", "compressed-tensors-int8"),
    Row("qwen3", "awq", dtype="float16"),
    Row("qwen3", "gptq", dtype="float16"),
    Row("qwen3", None, SEVERAL_RANKS, tensor=2),
    Row("qwen3-moe", None, SEVERAL_RANKS, tensor=2, expert=2),
    Row("deepseek-v3", None, SEVERAL_RANKS, tensor=2, expert=2),
    Row("qwen3", data=2),
    Row("llama", draft="draft_model"),
    Row("llama", draft="eagle"),
    Row("llama", draft="eagle3"),
    Row("deepseek-v3", draft="mtp"),
)


def measure(row: Row, folder: Path, *, gpu: int | None, controls: int, environment: dict[str, str]) -> dict[str, Any]:
    """Return what came of one row, on GPUs from this one on; never raises for what vLLM or the appliance refuse.

    `environment` is vLLM's, beside what these rows set.
    """
    began = time.monotonic()
    result: dict[str, Any] = {"row": row.name}
    engine: dict[str, Any] = {"kind": "vllm", "port": 18000, "args": ["--max-model-len", "512", *row.arguments]}
    if gpu is not None:
        engine["args"] += [*GPU_ARGUMENTS, *GPU_GRAPHS]
        engine["environment"] = GPU_ENVIRONMENT | environment
    else:
        engine["args"] += ["--enforce-eager"]
        engine["environment"] = CPU_ENVIRONMENT | environment
    parallel = {"tensor": row.tensor, "expert": row.expert, "data": row.data}
    settings: dict[str, Any] = {"engine": engine, "parallel": parallel, "dtype": row.dtype}
    if gpu is not None:
        settings["gpus"] = list(range(gpu, gpu + row.ranks))
    checkpoint = make_checkpoint(
        folder / "made",
        architecture=row.architecture,
        method=row.method,
        large=gpu is not None or row.method is not None,
    )
    if row.draft:
        settings["draft"] = add_draft(folder / "draft", checkpoint, row.draft)
    site = Site(folder / "site", checkpoint, wait=RESIDENT_TIMEOUT_S, **settings)
    with (folder / "log.txt").open("w") as log:
        environ = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
        argv = [sys.executable, "-m", "appliance.vllm.parity", "--manifest", str(site.manifest), "--model", MODEL]
        argv += ["--control", str(controls)]
        try:
            with ServiceManager(folder) as manager:
                with _kept(site, manager, row, environ, log):
                    result["resident_s"] = round(time.monotonic() - began, 1)
                with _kept(site, manager, row, environ, log):
                    result["given_back"] = len(manager.names())
                    status, said = _ended(argv, log, environ, timeout_s=PARITY_TIMEOUT_S + controls * CONTROL_TIMEOUT_S)
            found = Parity.read(said)
            result |= {"status": status, **({} if found is None else asdict(found))}
        except Exception as error:
            result |= {"status": -1, "error": f"{type(error).__name__}: {error}"[:600]}
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


@contextlib.contextmanager
def _kept(site: Site, manager: ServiceManager, row: Row, environ: dict[str, str], log: TextIO) -> Iterator[None]:
    """Run a keeper, given what the manager has of it, from when every shard is resident; kill it at the end."""
    with KeeperProcess(site.manifest, given=manager.handed_over(), environ=environ | manager.environ, log=log):
        with site.client() as client:
            for role in ("target", "draft") if row.draft else ("target",):
                for rank in range(row.ranks):
                    client.describe(role=role, rank=rank, wait_s=RESIDENT_TIMEOUT_S).configs.close()
        yield


def _ended(argv: Sequence[str], log: TextIO, environ: dict[str, str], *, timeout_s: float) -> tuple[int, str]:
    """Run a command; return its status and what it wrote. What it started and left behind is ended, too."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, env=environ, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=timeout_s)
        return process.returncode, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="where checkpoints and sites are made; DIR if left out")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs to spread the rows over; 0 is the CPU")
    parser.add_argument(
        "--control", type=int, nargs="?", default=0, const=1, help="serve each both ways so often once more"
    )
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="of vLLM")
    given = parser.parse_args(arguments)
    rows = [row for row in ROWS if not given.rows or row.name in given.rows]
    given.out.mkdir(parents=True, exist_ok=True)
    work = given.work or given.out
    environment = dict(pair.split("=", 1) for pair in given.environment)

    def one(row: Row) -> dict[str, Any]:
        folder = work / row.name
        folder.mkdir(parents=True)
        gpu = given.first_gpu + rows.index(row) % given.gpus if given.gpus and row.ranks == 1 else 0
        result = measure(row, folder, gpu=gpu if given.gpus else None, controls=given.control, environment=environment)
        if work != given.out:
            (given.out / f"{row.name}.txt").write_bytes((folder / "log.txt").read_bytes()[-60_000:])
        line = json.dumps(result)
        with (given.out / "rows.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
        return result

    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(one, rows))
    return sum(result["status"] != 0 for result in results)


if __name__ == "__main__":
    sys.exit(main())
