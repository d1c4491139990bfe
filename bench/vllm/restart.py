"""What a restart of vLLM costs, phase by phase: attached to a keeper's weights, and reading them from disk.

    python -m bench.vllm.restart --out DIR --work DIR --checkpoint DIR [--rounds 2] [--gpu [N]] [--preload]
        [-- ARGUMENT...]

With --preload also from vLLM's own weight cache, which wants a GPU and vLLM 0.31 or later. The same folder is served in
every way, so that all find the same compiled graphs; what is compiled at first is no part of
the figures. DIR gets results.json, a table, and every line of every engine with its time.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.client import KeeperClient, RefusedError
from appliance.inventory import gpus
from appliance.verdict import Reason
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.environment import environment
from bench.gpu.sampler import used_bytes
from bench.vllm.preload import cached_arguments, preloaded
from tests.sites import MODEL, Site

READY_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 90.0
PROMPT = "The capital of France is"
SAMPLE_S = 0.05
# So often each engine answers the same prompt, to tell what differs between starts from what differs in one of them.
ANSWERS = 3
# Each phase ends with the first line that says so, in this order; a line that this vLLM does not write ends nothing.
ENDS = (
    ("imports of the server", r"vLLM API server version|Resolved architecture"),
    ("configuration", r"Initializing a V1 LLM engine"),
    ("distributed init", r"world_size=\d+ rank=\d+"),
    ("worker, model runner", r"Starting to load model|Loading model from scratch"),
    # On a CPU nothing is said before memory is set aside, which takes none.
    ("weights", r"Model loading took|GiB for KV cache"),
    ("compiled graphs", r"torch\.compile (takes|took)|Directly load"),
    ("profiling", r"Available KV cache memory|GPU KV cache size"),
    ("graph capture", r"Graph capturing finished"),
    ("engine ready", r"init engine"),
    ("server ready", r"Application startup complete"),
)


@dataclass
class Start:
    """One start of an engine, in seconds after its process was started."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    healthy_s: float = 0.0
    first_token_s: float = 0.0
    texts: list[str] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    least_margin: float = math.inf
    peak_mib: int = 0
    before_mib: int = 0

    def phases_s(self) -> dict[str, float]:
        """Return how long each phase took; the last one is from readiness to the first token."""
        phases: dict[str, float] = {}
        last_s, position = 0.0, 0
        for name, pattern in ENDS:
            found = next(
                (index for index in range(position, len(self.lines)) if re.search(pattern, self.lines[index][1])), None
            )
            if found is not None:
                phases[name] = self.lines[found][0] - last_s
                last_s, position = self.lines[found][0], found + 1
        phases["first token"] = self.first_token_s - last_s
        return phases

    def take(self, answer: dict[str, Any]) -> None:
        """Note a completion: its text, and how far its two likeliest tokens were apart where they were closest."""
        choice = answer["choices"][0]
        self.texts.append(choice["text"])
        self.logprobs.append(choice["logprobs"]["token_logprobs"])
        for likely in choice["logprobs"]["top_logprobs"]:
            first, second, *_ = sorted(likely.values(), reverse=True)
            self.least_margin = min(self.least_margin, first - second)

    def worker_s(self) -> dict[str, float]:
        """Return how long the steps of attaching took in the slowest worker, as an attached engine tells it."""
        told = next((line for _, line in self.lines if line.startswith("weights: ")), "")
        return {name: float(seconds) for name, seconds in re.findall(r"worker\.(\w+) ([\d.]+) s", told)}


@dataclass(frozen=True)
class Place:
    """The port that an engine is asked at, and the GPU that it runs on, by its number on this host."""

    port: int
    gpu: int | None

    def used_mib(self) -> int:
        """Return the memory in use on the GPU, 0 where there is none."""
        return 0 if self.gpu is None else used_bytes(gpus()[self.gpu].uuid) >> 20

    def get(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return what the engine answers, None where it does not."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
                return json.loads(text) if text.strip() else {}
        except (urllib.error.URLError, OSError, ValueError):
            return None


@contextmanager
def started(argv: Sequence[str], environ: dict[str, str], log: Path, place: Place) -> Iterator[Start]:
    """Run an engine until it has answered once, and end it."""
    start, began = Start(before_mib=place.used_mib()), time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
    ended = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with log.open("w") as file:
            for line in process.stdout:
                now = time.monotonic() - began
                start.lines.append((now, line.rstrip()))
                file.write(f"{now:8.3f} {line}")

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            start.peak_mib = max(start.peak_mib, place.used_mib())

    threads = [threading.Thread(target=read), threading.Thread(target=sample)]
    for thread in threads:
        thread.start()
    try:
        _wait(lambda: place.get("/health") is not None, process)
        start.healthy_s = time.monotonic() - began
        answer = place.get("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0})
        start.first_token_s = time.monotonic() - began
        assert answer is not None
        greedy = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 2}
        greedy["return_tokens_as_token_ids"] = True
        for _ in range(ANSWERS):
            answer = place.get("/v1/completions", greedy)
            assert answer is not None
            start.take(answer)
        yield start
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        ended.set()
        for thread in threads:
            thread.join()


def _wait(holds: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not holds():
        if process.poll() is not None:
            raise RuntimeError(f"the engine ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError("the engine does not get ready")
        time.sleep(0.02)


@contextmanager
def keeping(site: Site, log: Path) -> Iterator[float]:
    """Run the keeper until the block ends; yield after how many seconds the weights were resident."""
    began = time.monotonic()
    argv = [sys.executable, "-m", "appliance.keeper", "--manifest", str(site.manifest), "--model", MODEL]
    with log.open("w") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file)
        try:
            with site.client() as client:
                _wait_resident(client)
            yield time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)


def _wait_resident(client: KeeperClient) -> None:
    """Return once the weights are there; RefusedError as soon as the loader has failed, not after its retries."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            client.describe(role="target", rank=0, wait_s=1).configs.close()
            return
        except RefusedError as error:
            waits = error.verdict.reason in (Reason.LOADING, Reason.NOT_RESIDENT)
            if not waits or time.monotonic() > deadline:
                raise


def summary(starts: dict[str, list[Start]]) -> dict[str, Any]:
    """Return the figures. The very first start compiled for all others, and is only shown."""
    kinds: dict[str, Any] = {}
    for kind, all_of_them in starts.items():
        measured = all_of_them[1:] if kind == "attached" else all_of_them
        phases = [start.phases_s() for start in measured]
        names = dict.fromkeys(name for found in phases for name in found)
        kinds[kind] = {
            "first_start_s": round(all_of_them[0].first_token_s, 2),
            "first_token_s": [round(start.first_token_s, 2) for start in measured],
            "before_mib": [start.before_mib for start in measured],
            "peak_mib": [start.peak_mib for start in measured],
            "worker_s": [start.worker_s() for start in measured],
            "texts": [start.texts for start in all_of_them],
            "logprobs": [start.logprobs for start in all_of_them],
            "least_margin": [round(start.least_margin, 4) for start in all_of_them],
            "phases_s": {
                name: round(statistics.median(found[name] for found in phases if name in found), 3) for name in names
            },
        }
    texts = {text for all_of_them in starts.values() for start in all_of_them for text in start.texts}
    return {"kinds": kinds, "same_text": len(texts) == 1}


def shown(results: dict[str, Any]) -> str:
    """Return the figures as a table of Markdown."""
    kinds = results["kinds"]
    names = dict.fromkeys(name for kind in kinds.values() for name in kind["phases_s"])
    lines = [f"| phase, seconds | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for name in names:
        lines.append(f"| {name} | {' | '.join(str(kind['phases_s'].get(name, '')) for kind in kinds.values())} |")
    total = (statistics.median(kind["first_token_s"]) for kind in kinds.values())
    return "\n".join([*lines, f"| start to first token | {' | '.join(f'{seconds:.2f}' for seconds in total)} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder on the checkpoint's file system")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gpu", type=int, nargs="?", const=0, metavar="N", help="run on a GPU, 0 if not said which")
    parser.add_argument("--port", type=int, default=18010, help="of the engine; vLLM's weight cache takes the next")
    parser.add_argument("--preload", action="store_true", help="measure vLLM's own weight cache too")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="of vLLM")
    parser.add_argument("arguments", nargs="*", help="of vLLM, after --")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    variables = dict(pair.split("=", 1) for pair in given.environment)
    place = Place(given.port, given.gpu)
    engine: dict[str, Any] = {"kind": "vllm", "port": place.port, "args": given.arguments, "environment": variables}
    settings: dict[str, Any] = {} if place.gpu is None else {"gpus": [place.gpu]}
    site = Site(given.work, given.checkpoint, copy=os.link, engine=engine, wait=READY_TIMEOUT_S, **settings)
    target = site.target()
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    attach = [sys.executable, "-m", "appliance.engine", "--manifest", str(site.manifest), "--model", MODEL]
    starts: dict[str, list[Start]] = {}
    results: dict[str, Any] = {"checkpoint_bytes": sum(path.stat().st_size for path in given.checkpoint.iterdir())}

    def add(kind: str, start: Start) -> None:
        """Note a start, and write what there is: a bench that is cut off leaves what it has measured by then."""
        starts.setdefault(kind, []).append(start)
        if kind != "attached" or len(starts[kind]) > 1:
            figures = summary(starts)
            (out / "results.json").write_text(json.dumps(results | figures, indent=1))
            (out / "table.md").write_text(shown(figures) + "\n")

    with keeping(site, out / "keeper.txt") as resident_s:
        results |= {"resident_s": round(resident_s, 2), "resident_mib": place.used_mib()}
        for number in range(given.rounds + 1):
            with started(attach, environ, out / f"attached-{number}.txt", place) as start:
                add("attached", start)
        # Whatever the engines answered, they left what was donated as it was.
        scrub = [sys.executable, "-m", "appliance", "scrub", MODEL, "--manifest", str(site.manifest)]
        results["scrub_status"] = subprocess.run(scrub, check=False).returncode
    # The weights are linked there beside the configs.
    folder = target.manifest.directories.state / "configs" / target.identity.root_digest
    serve = [sys.executable, "-m", "appliance.vllm.command_line"]
    serve += serve_arguments(target.name, target.model, configs=folder)
    environ |= environment(target, site.manifest)

    def measure(kind: str, *arguments: str) -> None:
        for number in range(given.rounds):
            log = out / f"{kind.replace(' ', '-')}-{number}.txt"
            with started([*serve, *arguments], environ, log, place) as start:
                add(kind, start)

    measure("from disk", "--load-format", "safetensors")
    if given.preload:
        sockets = given.work / "sockets"
        daemon = preloaded(
            folder, given.arguments, environ, sockets=sockets, port=place.port + 1, log=out / "preload.txt"
        )
        with daemon as preloaded_s:
            results |= {"preloaded_s": round(preloaded_s, 2), "preloaded_mib": place.used_mib()}
            measure("vllm preload", *cached_arguments(sockets))
    figures = summary(starts)
    print(shown(figures), flush=True)
    return 0 if figures["same_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
