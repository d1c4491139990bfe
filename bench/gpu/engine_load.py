"""The built-in engine and its loader on a GPU: a checkpoint verified, loaded, kept, attached, scrubbed.

    python -m bench.gpu.engine_load [--gb 16.4] [--json FILE] [--fake]

Real processes of the appliance, told by a manifest; the checkpoint is signed, its files are in the page cache. What the
loader takes of the GPU's and the host's memory is sampled while it runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.gpu.device import FAKE_UUIDS, REPOSITORY, environment, visible
from bench.gpu.report import Report, parser
from bench.gpu.sampler import MemorySampler
from tests import gpu_process
from tests.engine.checkpoints import small_tokenizer
from tests.gpu_site import GpuSite
from tests.sites import MODEL

MIB = 1 << 20
CONTEXT_BYTES = 1 << 30  # of a process that computes: 641 MiB were measured, and cuBLAS takes some
SLAB_BYTES = 4 << 30
TOKENS = 24
LOAD_TIMEOUT_S = 200.0


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--gb", type=float, default=16.4)
    arguments.add_argument("--one", choices=("attach", "disk"), help=argparse.SUPPRESS)
    arguments.add_argument("--manifest", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--uuid", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.one:
        with gpu_process.gpus((args.uuid,), fake=args.fake):
            print(json.dumps(_engine(args.one, args.manifest)))
        return 0
    report = Report("engine_load", args.json)
    uuid = visible(fake=args.fake)[0] if not args.fake else FAKE_UUIDS[0]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        site = _site(Path(folder), uuid, gb=args.gb, fake=args.fake)
        size_bytes = sum(file.stat().st_size for file in site.checkpoint.glob("*.safetensors"))
        report.note(f"{size_bytes / 1e9:.2f} GB in {len(list(site.checkpoint.glob('*.safetensors')))} files")
        with MemorySampler(uuid) as memory, _HostSampler() as host:
            keeper = site.start_keeper()
            host.watch(keeper.pid)
            try:
                _wait(site)
            except BaseException:
                keeper.kill()
                report.note((keeper.communicate()[1] or "")[-2000:])
                raise
        try:
            _loaded(report, site, memory, host, size_bytes=size_bytes, fake=args.fake)
            _same_tokens(report, site, uuid, fake=args.fake)
            _scrubbed(report, site)
        finally:
            keeper.terminate()
            keeper.communicate(timeout=30)
    return int(report.failures > 0)


def _site(folder: Path, uuid: str, *, gb: float, fake: bool) -> GpuSite:
    seed = folder / "seed"
    seed.mkdir()
    small_tokenizer().save_pretrained(seed)
    site = GpuSite(folder / "site", seed, uuid, fake=fake)
    argv = [sys.executable, "-m", "bench.gpu.make_checkpoint", str(site.checkpoint), "--gb", str(gb)]
    subprocess.run([*argv, *(["--fake"] if fake else [])], check=True, cwd=REPOSITORY, env=environment(), timeout=200)
    site.sign()
    return site


def _wait(site: GpuSite) -> None:
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    with site.client() as client:
        client.describe(role="target", rank=0, wait_s=LOAD_TIMEOUT_S).configs.close()
    while site.status()["leases"]:
        if time.monotonic() > deadline:
            raise TimeoutError("the loader does not end")
        time.sleep(0.01)


def _loaded(
    report: Report, site: GpuSite, memory: MemorySampler, host: "_HostSampler", *, size_bytes: int, fake: bool
) -> None:
    [shard] = site.status()["shards"]
    phases = shard["phases_s"]
    for name, seconds in phases.items():
        rate = {"GBps": size_bytes / seconds / 1e9} if name in ("verify", "load") else {}
        report.figure(f"loader: {name}", 1e3 * seconds, "ms", **rate)
    extra_bytes = memory.peak_bytes - memory.start_bytes - shard["size_bytes"]
    report.figure("loader: peak device memory beside the weights", extra_bytes / MIB, "MiB", samples=memory.samples)
    report.check(
        "the loader takes no more than the weights, a slab and its context",
        extra_bytes <= SLAB_BYTES + CONTEXT_BYTES or fake,
        f"{extra_bytes / MIB:.0f} MiB beside {shard['size_bytes'] / MIB:.0f}",
    )
    report.figure("loader: peak resident host memory", host.peak_bytes / MIB, "MiB")
    report.figure(
        "device memory beyond the shard once the loader has ended",
        (memory.end_bytes - memory.start_bytes - shard["size_bytes"]) / MIB,
        "MiB",
    )


def _same_tokens(report: Report, site: GpuSite, uuid: str, *, fake: bool) -> None:
    results = {}
    for way in ("attach", "disk"):
        argv = [sys.executable, "-m", "bench.gpu.engine_load", "--one", way, "--manifest", str(site.manifest)]
        argv += ["--uuid", uuid, *(["--fake"] if fake else [])]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=REPOSITORY, env=environment())
        if not report.check(
            f"an engine by {way}", done.returncode == 0, done.stderr[-1500:] if done.returncode else ""
        ):
            return
        results[way] = json.loads(done.stdout.splitlines()[-1])
    for name, seconds in results["attach"]["phases_s"].items():
        report.figure(f"engine: {name}", 1e3 * seconds, "ms")
    report.check(
        f"the same {TOKENS} greedy tokens, attached and from disk",
        results["attach"]["tokens"] == results["disk"]["tokens"],
        f"{results['attach']['tokens']} {results['disk']['tokens']}",
    )
    report.note(f"NVML with an engine attached: {results['attach']['gpus']}")


def _scrubbed(report: Report, site: GpuSite) -> None:
    began = time.monotonic()
    done = site.call("scrub", MODEL, "--json")
    seconds = time.monotonic() - began
    if report.check("appliance scrub", done.returncode == 0, done.stderr[-500:] if done.returncode else ""):
        [shard] = json.loads(done.stdout)["shards"]
        report.figure("appliance scrub, the whole command", seconds, "s")
        report.figure("of it mapping, compiling and reading", 1e3 * shard["seconds"], "ms")
    done = site.call("status")
    report.check("appliance status", done.returncode == 0, done.stderr[-500:] if done.returncode else "")
    for line in done.stdout.splitlines():
        report.say(f"    {line}")


def _engine(way: str, manifest: Path) -> dict[str, Any]:
    """Come to weights in this process in one way or the other, and say what the model says."""
    from appliance.engine import disk
    from appliance.engine.__main__ import _language_model
    from appliance.engine.answer import Piece, Sampling
    from appliance.engine.weights import obtain
    from appliance.gpus import gpu_states
    from appliance.handover.weights import Weights
    from appliance.target import read_target
    from appliance.verdict import Outcome, Verdict

    target = read_target(manifest, MODEL)
    if way == "attach":
        weights = obtain(target, client_name="engine@m")
    else:
        loaded = disk.load_verified(target)
        weights = Weights(loaded.module, loaded.configs, Verdict(Outcome.DONATED), None, None, loaded.phases_s)  # type: ignore[arg-type]
    model = _language_model(weights)
    pieces: list[Piece] = []
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
    model.generate(
        model.tokenizer.encode("The weights stay"), sampling, emit=pieces.append, cancelled=threading.Event()
    )
    processes = [(state.used_bytes, [(p.pid, p.used_bytes) for p in state.processes]) for state in gpu_states()]
    return {
        "tokens": [token for piece in pieces for token in piece.token_ids],
        "phases_s": weights.phases_s,
        "gpus": f"own pid {os.getpid()}, {processes}",
    }


class _HostSampler:
    """While entered, watches the resident memory of a process's children; the largest peak of any is `peak_bytes`."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._pid = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-sampler", daemon=True)

    def watch(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> "_HostSampler":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            if not self._pid:
                continue
            try:
                for task in Path(f"/proc/{self._pid}/task").iterdir():
                    for child in (task / "children").read_text().split():
                        status = Path(f"/proc/{child}/status").read_text()
                        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
                        self.peak_bytes = max(self.peak_bytes, 1024 * int(peak.split()[1]))
            except (OSError, StopIteration):  # it ended, or is not a program yet
                continue


if __name__ == "__main__":
    raise SystemExit(main())
