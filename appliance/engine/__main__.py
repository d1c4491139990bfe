"""`python -m appliance.engine --manifest FILE --model NAME`: what `engine@NAME.service` runs."""

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.canary import MAX_TOKENS, PROMPT, CanaryRecord
from appliance.client import RefusedError
from appliance.descriptors import make_room
from appliance.engine.imports import import_heavy_modules
from appliance.errors import ApplianceError, TrustError
from appliance.events import ERROR, WARNING, event
from appliance.notify import Notifier
from appliance.quantities import format_phases
from appliance.target import Target, read_target
from appliance.verdict import Outcome

if TYPE_CHECKING:
    from appliance.engine.generation import LanguageModel
    from appliance.handover.lease import Lease
    from appliance.handover.weights import Weights

WAIT_EXTENSION_S = 120.0
DEFAULT_WATCHDOG_S = 60.0


def main() -> int:
    """Serve one model until SIGTERM; return the exit status."""
    started = _process_start()
    parser = argparse.ArgumentParser(prog="python -m appliance.engine", description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    notifier = Notifier(os.environ)
    make_room()
    try:
        return _serve(arguments.manifest, arguments.model, notifier=notifier, started=started)
    except ApplianceError as error:
        event(f"appliance: {error}", priority=ERROR, model=arguments.model, **_refusal(error))
        notifier.status(error.message)
        return error.exit_status


def _refusal(error: ApplianceError) -> dict[str, str]:
    """Return the journal's fields for an engine that may not have the weights it wants; none for other errors."""
    if isinstance(error.__cause__, RefusedError):
        return {"verdict": str(Outcome.REFUSED), "reason": str(error.__cause__.verdict.reason)}
    if isinstance(error, TrustError):
        return {"verdict": str(Outcome.REFUSED), "reason": "not_trusted"}
    return {}


def _serve(manifest: Path, name: str, *, notifier: Notifier, started: float) -> int:
    phases = {"interpreter": _now() - started}
    began = time.monotonic()
    target = read_target(manifest, name)
    phases["identity"] = time.monotonic() - began
    if target.model.engine.kind == "vllm":
        from appliance.vllm.server import serve

        return serve(target, manifest, notifier=notifier, phases_s=phases)
    _serve_builtin(target, notifier=notifier, started=started, phases=phases)
    return 0


def _serve_builtin(target: Target, *, notifier: Notifier, started: float, phases: dict[str, float]) -> None:
    name = target.name
    phases["imports"] = import_heavy_modules()
    from appliance.engine.device import show_only_own
    from appliance.engine.weights import obtain
    from appliance.handover.lease import Lease

    show_only_own(target)

    def waiting(text: str) -> None:
        notifier.status(text)
        notifier.extend_timeout(WAIT_EXTENSION_S)

    weights = obtain(target, client_name=f"engine@{name}", on_progress=waiting)
    phases |= weights.phases_s
    lease = None
    if weights.client is not None:
        lease = Lease(weights.client, target.socket_path, shard_id=weights.record.shard_id, name=f"engine@{name}")
    try:
        began = time.monotonic()
        model = _language_model(weights)
        phases["tokenizer"] = time.monotonic() - began
        phases["first_token"] = _first_token(
            model, CanaryRecord.of(target.manifest.directories.state, weights.record.fingerprint)
        )
        phases["total"] = _now() - started
        event(
            f"weights: {weights.verdict}; {format_phases(phases)}",
            model=name,
            verdict=weights.verdict.outcome,
            root_digest=weights.record.fingerprint.root_digest,
        )
        asyncio.run(_run(target, model, weights, notifier=notifier, lease=lease, phases=phases))
    finally:
        if lease is not None:
            lease.end()


def _language_model(weights: "Weights") -> "LanguageModel":
    from appliance import configs
    from appliance.engine.configs import load_sampling_defaults
    from appliance.engine.generation import LanguageModel
    from appliance.engine.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="appliance-configs-") as folder:
        configs.write(weights.configs, Path(folder))
        tokenizer = load_tokenizer(Path(folder))
        defaults = load_sampling_defaults(Path(folder))
    return LanguageModel(weights.module, tokenizer, defaults=defaults)


def _first_token(model: "LanguageModel", canary: CanaryRecord) -> float:
    """Generate, so that READY=1 means that the weights work; return the seconds that the first token took.

    The first engine on a newly loaded shard generates the canary's tokens and records them.
    """
    from appliance.engine.answer import Piece, Sampling

    record = canary.load() is None
    sampling = Sampling(max_tokens=MAX_TOKENS if record else 1, temperature=0.0)
    pieces: list[Piece] = []
    first: list[float] = []

    def heard(piece: Piece) -> None:
        first.append(time.monotonic())
        pieces.append(piece)

    began = time.monotonic()
    model.generate(model.tokenizer.encode(PROMPT), sampling, emit=heard, cancelled=threading.Event())
    if record:
        try:
            canary.save([token for piece in pieces for token in piece.token_ids])
        except OSError as error:  # a container without the state directory
            event(f"the canary is not recorded: {canary.path}: {error.strerror}", priority=WARNING)
    return first[0] - began


async def _run(
    target: Target,
    model: "LanguageModel",
    weights: "Weights",
    *,
    notifier: Notifier,
    lease: "Lease | None",
    phases: dict[str, float],
) -> None:
    from appliance.engine.server import ROUTES, make_app, serve

    settings = target.model.engine
    verdict = str(weights.verdict.outcome)
    root_digest = weights.record.fingerprint.root_digest

    def health() -> dict[str, object]:
        return {
            "model": target.name,
            "verdict": verdict,
            "root_digest": root_digest,
            "signer": weights.record.signer,
            "leased": lease is not None and lease.held,
            "phases_s": phases,
        }

    def ready(host: str, port: int) -> None:
        if lease is not None:
            lease.use(lambda client: client.report(weights.verdict, phases))
        notifier.ready(f"{verdict}: serving {target.name} on {host}:{port}")

    app = make_app(model, name=target.name, health=health, collectors=[_Attachment(target.name, verdict, phases)])
    feeding = asyncio.create_task(_feed_watchdog(notifier, lambda: app[ROUTES].is_working))
    try:
        await serve(app, host=settings.host, port=settings.port, started=ready)
        notifier.stopping("stopping")
    finally:
        feeding.cancel()


async def _feed_watchdog(notifier: Notifier, is_working: Callable[[], bool]) -> None:
    # A loop that turns answers nobody if the model's thread is gone.
    while True:
        if is_working():
            notifier.watchdog()
        await asyncio.sleep((notifier.watchdog_s or DEFAULT_WATCHDOG_S) / 3)


class _Attachment(Collector):
    """How this engine came to its weights, for Prometheus."""

    def __init__(self, model: str, verdict: str, phases: dict[str, float]) -> None:
        self._model = model
        self._verdict = verdict
        self._phases = phases

    def collect(self) -> Iterator[Metric]:
        attached = GaugeMetricFamily(
            "appliance_engine_weights", "1 for how it came to its weights", labels=["model", "verdict"]
        )
        attached.add_metric([self._model, self._verdict], 1.0)
        yield attached
        seconds = GaugeMetricFamily(
            "appliance_engine_start_seconds", "The last start, by phase", labels=["model", "phase"]
        )
        for phase, value in self._phases.items():
            seconds.add_metric([self._model, phase], value)
        yield seconds


def _process_start() -> float:
    """Return when this process started, in seconds since boot; proc(5), field 22 of /proc/self/stat, in clock ticks."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    sys.exit(main())
