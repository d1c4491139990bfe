"""The keeper's HTTP side: `/health` for probes and `/metrics` for Prometheus. Numbers are derived at each scrape."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.errors import HostError
from appliance.keeper.holdings import Holdings, State

SHUTDOWN_TIMEOUT_S = 2.0


class HoldingsCollector(Collector):
    """Prometheus metrics of one model's holdings."""

    def __init__(self, holdings: Holdings, *, model: str) -> None:
        self._holdings = holdings
        self._model = model

    def collect(self) -> Iterator[Metric]:
        holdings, labels = self._holdings, ["model", "role", "rank", "device"]
        held = GaugeMetricFamily("appliance_weights_bytes", "Bytes of weights held", labels=labels)
        loads = GaugeMetricFamily("appliance_load_seconds", "How long the last load took", labels=labels)
        verifications = GaugeMetricFamily("appliance_verification_seconds", "Of it, reading and hashing", labels=labels)
        scrubbed = GaugeMetricFamily(
            "appliance_last_scrub_timestamp_seconds", "When resident bytes were last compared", labels=labels
        )
        damaged = GaugeMetricFamily("appliance_damaged_slabs", "Slabs that the last scrub found changed", labels=labels)
        for shard in holdings.shards():
            record = shard.record
            values = [self._model, record.role, str(record.rank), record.device]
            held.add_metric(values, record.size_bytes)
            loads.add_metric(values, record.phases_s.get("load", 0.0))
            verifications.add_metric(values, record.phases_s.get("verify", 0.0))
            if (scrub := holdings.scrub(shard)) is not None:
                scrubbed.add_metric(values, scrub.time)
                damaged.add_metric(values, len(scrub.damaged))
        yield from (held, loads, verifications, scrubbed, damaged)
        scrubs = CounterMetricFamily("appliance_scrubs", "Shards compared with checksums", labels=["model", "result"])
        for result, count in holdings.scrub_counts.items():
            scrubs.add_metric([self._model, result], count)
        yield scrubs
        resident = holdings.state is State.RESIDENT
        yield _gauge("appliance_resident", "1 when every shard is resident", self._model, float(resident))
        yield _gauge("appliance_leases", "Processes that have a shard mapped", self._model, len(holdings.leases))
        yield _gauge(
            "appliance_checkpoint_refused",
            "1 while the checkpoint on disk is refused",
            self._model,
            float(bool(holdings.refusal)),
        )
        verdicts = CounterMetricFamily(
            "appliance_attach", "Attempts to get weights", labels=["model", "verdict", "reason"]
        )
        for (outcome, reason), count in holdings.verdict_counts.items():
            verdicts.add_metric([self._model, outcome, reason], count)
        yield verdicts


def make_app(
    collector: Collector, health: Callable[[], dict[str, Any]], *, ready: Callable[[], bool]
) -> web.Application:
    """Return the application: 200 on /health when every shard is resident, 503 before, the body says why."""
    registry = CollectorRegistry()
    registry.register(collector)

    async def get_health(request: web.Request) -> web.Response:
        return web.json_response(health(), status=200 if ready() else 503)

    async def get_metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(client_max_size=4096)
    app.router.add_get("/health", get_health)
    app.router.add_get("/metrics", get_metrics)
    return app


async def serve(app: web.Application, *, host: str, port: int, listening: asyncio.Event) -> None:
    """Serve until cancelled; the event is set once it listens. HostError where the port is taken."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        listening.set()
        await asyncio.get_running_loop().create_future()
    except OSError as error:
        raise HostError(
            f"health: cannot listen on {host}:{port}: {error.strerror or error}", hint="set another health.port"
        ) from error
    finally:
        await runner.cleanup()


def _gauge(name: str, text: str, model: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["model"])
    family.add_metric([model], value)
    return family
