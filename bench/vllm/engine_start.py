"""One start of an engine: when each of its lines came, what it answered, and the memory of the GPU beside."""

import json
import math
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.inventory import gpus
from bench.gpu.sampler import used_bytes
from tests.sites import MODEL

READY_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 90.0
PROMPT = "The capital of France is"
SAMPLE_S = 0.05
# So often each engine answers the same prompt, to tell what differs between starts from what differs in one of them.
ANSWERS = 3
# An engine of ours says so when its own first question is answered: what is asked beside that is another batch.
OWN_QUESTION_ANSWERED = "weights: "
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
        told = next((line for _, line in self.lines if line.startswith(OWN_QUESTION_ANSWERED)), "")
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
def started(
    argv: Sequence[str], environ: dict[str, str], log: Path, place: Place, *, quiet_after: str = ""
) -> Iterator[Start]:
    """Run an engine until it has answered, and end it; of one that asks itself at first, wait until it says that."""
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
        answer = place.get("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0})
        start.first_token_s = time.monotonic() - began
        assert answer is not None
        greedy = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 2}
        greedy["return_tokens_as_token_ids"] = True
        _wait(lambda: any(line.startswith(quiet_after) for _, line in list(start.lines)), process)
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
