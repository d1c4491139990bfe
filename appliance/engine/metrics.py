"""What Prometheus reads from the engine. Labels take few values whatever clients send."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The engine's own registry: nothing here is global, so several engines may live in one process."""

    def __init__(
        self, *, queue_depth: Callable[[], float], running: Callable[[], float], collectors: Iterable[Collector] = ()
    ) -> None:
        """`collectors` are shown beside these: a registry of another part of the engine is one."""
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "appliance_engine_requests_total",
            "Requests by route and HTTP status; 499 is a client that left.",
            ("route", "status"),
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "appliance_engine_prompt_tokens_total", "Tokens of prompts that were answered.", registry=self._registry
        )
        self._completion_tokens = Counter(
            "appliance_engine_completion_tokens_total", "Tokens generated.", registry=self._registry
        )
        self._first_token = Histogram(
            "appliance_engine_first_token_seconds",
            "From the arrival of a request to its first token, waiting in the queue included.",
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        Gauge(
            "appliance_engine_queue_depth", "Requests that wait for the model.", registry=self._registry
        ).set_function(queue_depth)
        Gauge(
            "appliance_engine_requests_running", "Requests being answered, 0 or 1.", registry=self._registry
        ).set_function(running)
        for collector in collectors:
            self._registry.register(collector)

    def count_request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def count_prompt(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    def count_completion(self, tokens: int) -> None:
        self._completion_tokens.inc(tokens)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
