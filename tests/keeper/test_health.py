"""The keeper's HTTP side: 200 when every shard is resident, 503 with a reason before, and metrics that parse."""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.errors import HostError
from appliance.keeper import health
from appliance.keeper.holdings import Holdings, Lease, State
from appliance.keeper.status import status
from appliance.ports import free_port
from appliance.verdict import Outcome, Reason, Verdict, refused
from tests.keeper.probe import got
from tests.keeper.shards import TARGET, shard_of, slots


def while_serving(holdings: Holdings, act: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        port = free_port()
        listening = asyncio.Event()
        app = health.make_app(
            health.HoldingsCollector(holdings, model="m"),
            lambda: status(holdings, model="m", target=TARGET, signer=""),
            ready=lambda: holdings.state is State.RESIDENT,
        )
        serving = asyncio.create_task(health.serve(app, host="127.0.0.1", port=port, listening=listening))
        async with asyncio.timeout(20):
            await listening.wait()
            await act(f"http://127.0.0.1:{port}")
            serving.cancel()
            await asyncio.wait({serving})

    asyncio.run(run())


def values(body: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def test_health_says_503_and_why_before_everything_is_resident_and_200_after() -> None:
    holdings = Holdings()
    holdings.lay_out(slots(2))
    answers: list[tuple[int, dict[str, Any]]] = []

    async def ask(url: str) -> None:
        async def note() -> None:
            code, kind, body = await asyncio.to_thread(got, f"{url}/health")
            assert kind.startswith("application/json")
            answers.append((code, json.loads(body)))

        await note()
        holdings.progress = "reading 3 of 8"
        await note()
        holdings.progress, holdings.trouble = "", "the loader failed"
        await note()
        holdings.refusal = "bad signature"
        await note()
        holdings.refusal = ""
        for rank in (0, 1):
            holdings.put(shard_of(rank=rank))
            await note()

    while_serving(holdings, ask)
    assert [code for code, _ in answers] == [503, 503, 503, 503, 503, 200]
    assert [body["state"] for _, body in answers] == ["empty", "loading", "empty", "empty", "empty", "resident"]
    assert answers[1][1]["progress"] == "reading 3 of 8"
    assert answers[2][1]["trouble"] == "the loader failed"
    assert (answers[3][1]["trouble"], answers[3][1]["refused"]) == ("bad signature", True)
    for shard in holdings.shards():
        shard.close()


def test_metrics_parse_and_say_what_is_held_and_how_attaches_ended() -> None:
    holdings = Holdings()
    holdings.lay_out(slots(2))
    shard = shard_of(slabs=3, phases_s={"load": 12.5, "verify": 4.25})
    holdings.put(shard)
    holdings.leases.add(Lease("engine", 1, 0, shard.record.shard_id, Outcome.HIT))
    for verdict in (
        Verdict(Outcome.HIT),
        Verdict(Outcome.HIT),
        Verdict(Outcome.DONATED),
        refused(Reason.FINGERPRINT_DIFFERS),
        refused(Reason.FILE_DIFFERS),
        refused(Reason.FILE_DIFFERS),
    ):
        holdings.judge(verdict, client='an "engine"\n')
    for slabs in ([], [0, 2]):
        holdings.note_scrub(shard, slabs)
    holdings.refusal = "bad signature"
    bodies: list[str] = []

    async def ask(url: str) -> None:
        code, kind, body = await asyncio.to_thread(got, f"{url}/metrics")
        assert (code, kind.split(";")[0]) == (200, "text/plain")
        bodies.append(body)

    while_serving(holdings, ask)
    found = values(bodies[0])
    model = ("model", "m")
    shard_labels = (("device", "cpu"), model, ("rank", "0"), ("role", "target"))
    assert found[("appliance_weights_bytes", shard_labels)] == 3 * 4096
    assert found[("appliance_load_seconds", shard_labels)] == 12.5
    assert found[("appliance_verification_seconds", shard_labels)] == 4.25
    assert found[("appliance_leases", (model,))] == 1
    assert found[("appliance_resident", (model,))] == 0
    assert found[("appliance_checkpoint_refused", (model,))] == 1
    assert found[("appliance_scrubs_total", (model, ("result", "intact")))] == 1
    assert found[("appliance_scrubs_total", (model, ("result", "damaged")))] == 1
    assert found[("appliance_damaged_slabs", shard_labels)] == 2
    assert abs(found[("appliance_last_scrub_timestamp_seconds", shard_labels)] - time.time()) < 60
    attaches = {
        (dict(labels)["verdict"], dict(labels)["reason"]): value
        for (name, labels), value in found.items()
        if name == "appliance_attach_total"
    }
    assert attaches == {
        ("hit", ""): 2,
        ("donated", ""): 1,
        ("refused", "fingerprint_differs"): 1,
        ("refused", "file_differs"): 2,
    }
    shard.close()


@pytest.mark.parametrize("path", ["/", "/health/", "/status", "/../etc/passwd"])
def test_nothing_else_is_served(path: str) -> None:
    holdings = Holdings()
    codes: list[int] = []

    async def ask(url: str) -> None:
        codes.append((await asyncio.to_thread(got, url + path))[0])

    while_serving(holdings, ask)
    assert codes == [404]


def test_nothing_can_be_changed_over_http() -> None:
    codes: list[int] = []

    def post(url: str) -> int:
        request = urllib.request.Request(f"{url}/health", data=b"x" * 100_000, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status_code: int = answer.status
                return status_code
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:  # hung up on while it was still sending
            return 405

    async def ask(url: str) -> None:
        codes.append(await asyncio.to_thread(post, url))

    while_serving(Holdings(), ask)
    assert codes == [405]


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    async def run(port: int) -> None:
        app = health.make_app(health.HoldingsCollector(Holdings(), model="m"), dict, ready=lambda: True)
        listening = asyncio.Event()
        with pytest.raises(HostError, match=f"health: cannot listen on 127.0.0.1:{port}: .*in use"):
            await health.serve(app, host="127.0.0.1", port=port, listening=listening)
        assert not listening.is_set()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asyncio.run(run(taken.getsockname()[1]))


def test_a_probe_that_never_ends_its_request_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SHUTDOWN_TIMEOUT_S", 0.1)

    async def ask(url: str) -> None:
        port = int(url.rpartition(":")[2])
        with closing(socket.create_connection(("127.0.0.1", port))) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            assert (await asyncio.to_thread(got, f"{url}/health"))[0] == 503
            left_open.append(probe.dup())

    left_open: list[socket.socket] = []
    while_serving(Holdings(), ask)
    for probe in left_open:
        probe.close()
