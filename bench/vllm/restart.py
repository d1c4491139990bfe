"""What a restart of vLLM costs, phase by phase: attached to a keeper's weights, and reading them from disk.

    python -m bench.vllm.restart --out DIR --work DIR --checkpoint DIR [--rounds 2] [--gpu [N]] [--preload]
        [-- ARGUMENT...]

With --preload also from vLLM's own weight cache, which wants a GPU and vLLM 0.31 or later. Every round measures each
way once, as a machine is not equally fast at all times. The same folder is served in every way, so that all find the
same compiled graphs; what is compiled at first is no part of the figures. DIR gets results.json, a table, and every
line of every engine with its time.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.client import KeeperClient, RefusedError
from appliance.target import Target
from appliance.verdict import Reason
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.environment import environment
from bench.vllm.engine_start import OWN_QUESTION_ANSWERED, READY_TIMEOUT_S, STOP_TIMEOUT_S, Place, Start, started
from bench.vllm.preload import cached_arguments, preloaded
from tests.sites import MODEL, Site


@contextmanager
def keeping(site: Site, log: Path) -> Iterator[float]:
    """Run the keeper until the block ends; yield after how many seconds the weights were resident."""
    began = time.monotonic()
    argv = [sys.executable, "-m", "appliance.keeper", "--manifest", str(site.manifest), "--model", MODEL]
    with log.open("a") as file:
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


@dataclass
class Bench:
    """One checkpoint, the ways in which an engine gets its weights, and what was measured of them by now."""

    out: Path
    work: Path
    site: Site
    target: Target
    place: Place
    starts: dict[str, list[Start]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def attached(self) -> None:
        """Have a keeper load, and engines attach; the first of them all compiles for every other."""
        argv = [sys.executable, "-m", "appliance.engine", "--manifest", str(self.site.manifest), "--model", MODEL]
        environ = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
        with keeping(self.site, self.out / "keeper.txt") as resident_s:
            self._note("resident_s", round(resident_s, 2))
            self._note("resident_mib", self.place.used_mib())
            for _ in range(1 if self.starts else 2):
                self._measure("attached", argv, environ, quiet_after=OWN_QUESTION_ANSWERED)
            # Whatever the engines answered, they left what was donated as it was.
            scrub = [sys.executable, "-m", "appliance", "scrub", MODEL, "--manifest", str(self.site.manifest)]
            self._note("scrub_status", subprocess.run(scrub, check=False).returncode)

    def from_disk(self) -> None:
        """Have an engine read the checkpoint, with vLLM's default loader."""
        self._measure("from disk", [*self._serve(), "--load-format", "safetensors"], self._environ())

    def preloaded(self) -> None:
        """Have vLLM's own daemon load, and an engine take its weights."""
        sockets, log = self.work / "sockets", self.out / "preload.txt"
        environ, port = self._environ(), self.place.port + 1
        arguments = self.target.model.engine.args
        with preloaded(self._folder(), arguments, environ, sockets=sockets, port=port, log=log) as preloaded_s:
            self._note("preloaded_s", round(preloaded_s, 2))
            self._note("preloaded_mib", self.place.used_mib())
            self._measure("vllm preload", [*self._serve(), *cached_arguments(sockets)], environ)

    def _folder(self) -> Path:
        """Return what is served in every way: an engine that attached has linked weights there beside the configs."""
        return self.target.manifest.directories.state / "configs" / self.target.identity.root_digest

    def _serve(self) -> list[str]:
        argv = [sys.executable, "-m", "appliance.vllm.command_line"]
        return [*argv, *serve_arguments(self.target.name, self.target.model, configs=self._folder())]

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environment(self.target, self.site.manifest)}

    def _note(self, name: str, value: float) -> None:
        self.results.setdefault(name, []).append(value)

    def _measure(self, kind: str, argv: Sequence[str], environ: dict[str, str], *, quiet_after: str = "") -> None:
        """Start an engine, and write what there is: a bench that is cut off leaves what it has measured by then."""
        before = self.starts.setdefault(kind, [])
        log = self.out / f"{kind.replace(' ', '-')}-{len(before)}.txt"
        with started(argv, environ, log, self.place, quiet_after=quiet_after) as start:
            before.append(start)
        if kind != "attached" or len(before) > 1:
            figures = summary(self.starts)
            (self.out / "results.json").write_text(json.dumps(self.results | figures, indent=1))
            (self.out / "table.md").write_text(shown(figures) + "\n")


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
    bench = Bench(out, given.work, site, site.target(), place)
    bench.results["checkpoint_bytes"] = sum(path.stat().st_size for path in given.checkpoint.iterdir())
    for _ in range(given.rounds):
        bench.attached()
        bench.from_disk()
        if given.preload:
            bench.preloaded()
    figures = summary(bench.starts)
    print(shown(figures), flush=True)
    return 0 if figures["same_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
