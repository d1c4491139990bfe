"""Runs Python in the environment that has vLLM: `./install.sh --test` makes it beside that of the tests."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.demo.cache import default_cache
from tests.tiers import cannot_run

ROOT = Path(__file__).parents[2]
# Names another Python with vLLM and what the tests need.
PYTHON_VARIABLE = "APPLIANCE_VLLM_PYTHON"
# One thread for each rank, and none of the logging: the two engines of a comparison add in the same order.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def vllm_home() -> Path:
    """Return the folder of that Python's programs, whether or not it is there."""
    return Path(os.environ.get(PYTHON_VARIABLE) or f"{sys.prefix}-vllm/bin/python").parent


# In the manifest of an engine. What vLLM finds out about an architecture, in a process that takes seconds, is kept.
ENGINE_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CACHE_ROOT": str(default_cache() / "vllm"),
}


def vllm_python() -> str:
    """Return the interpreter; the test cannot run where there is none."""
    python = vllm_home() / "python"
    if not python.exists():
        cannot_run(f"vLLM: no {python}; ./install.sh --test makes it, where the processor has AVX2")
    return str(python)


def environment(**more: str) -> dict[str, str]:
    """Return what a process with vLLM finds in its environment."""
    return {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT), **more}


def start(*arguments: str, environ: Mapping[str, str] | None = None, **popen: Any) -> "subprocess.Popen[str]":
    """Start that Python with these arguments."""
    told = environment(**(environ or {}))
    return subprocess.Popen([vllm_python(), *arguments], cwd=ROOT, env=told, text=True, **popen)


def run(*arguments: str, timeout_s: float, environ: Mapping[str, str] | None = None) -> str:
    """Run it to its end and return what it printed; AssertionError with its last words where it fails."""
    told = environment(**(environ or {}))
    argv = [vllm_python(), *arguments]
    done = subprocess.run(argv, cwd=ROOT, env=told, text=True, capture_output=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return done.stdout
