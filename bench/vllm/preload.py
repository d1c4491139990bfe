"""vLLM's own weight cache, `vllm preload`, as the peer that a restart is compared with."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

READY_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1


@contextmanager
def preloaded(
    model: Path, arguments: Sequence[str], environ: dict[str, str], *, sockets: Path, port: int, log: Path
) -> Iterator[float]:
    """Run the daemon until the block ends; yield after how many seconds it had the weights.

    RuntimeError where it ends before, TimeoutError where it takes too long.
    """
    sockets.mkdir(mode=0o700, exist_ok=True)
    argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model", str(model)]
    argv += ["--weight-cache-socket-dir", str(sockets)]
    argv += ["--weight-cache-health-host", "127.0.0.1", "--weight-cache-health-port", str(port), *arguments]
    began = time.monotonic()
    with log.open("a") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file, env=environ)
        try:
            while not _is_ready(port):
                if process.poll() is not None:
                    raise RuntimeError(f"vllm preload ended with status {process.returncode}: {log.read_text()[-500:]}")
                if time.monotonic() - began > READY_TIMEOUT_S:
                    raise TimeoutError("vllm preload does not get ready")
                time.sleep(POLL_S)
            yield time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            process.kill()
            process.wait()


def cached_arguments(sockets: Path) -> list[str]:
    """Return what makes `vllm serve` take its weights from that daemon, or end."""
    config = {"socket_dir": str(sockets), "fallback": False}
    return ["--load-format", "ipc_cache", "--model-loader-extra-config", json.dumps(config)]


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
