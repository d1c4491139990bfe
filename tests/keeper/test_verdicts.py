"""What is said and remembered of each attempt to attach: one verdict, and what its engine reports."""

import select
import socket
import threading
from contextlib import closing

import pytest

from appliance import wire
from appliance.keeper import answers
from appliance.verdict import Outcome, Reason, Verdict, refused
from tests.keeper.serving import Serving, attach, donate, hear, offer, refusal_of, say
from tests.keeper.shards import OTHER_TARGET, TARGET, donation_of, fingerprint_of


def test_every_attempt_is_counted_by_outcome_and_reason(serving: Serving) -> None:
    with serving.connect() as client:
        refusal_of(lambda: attach(client, fingerprint_of(TARGET)))
        offer(client)
        with closing(donation_of()) as donation:
            donate(client, donation)
        attach(client, fingerprint_of(TARGET))
        refusal_of(lambda: attach(client, OTHER_TARGET))
        client.report(refused(Reason.FILE_DIFFERS, "model.safetensors differs"), {})
        verdicts = client.status()["verdicts"]
    assert dict(serving.holdings.verdict_counts) == {
        ("refused", "not_resident"): 1,
        ("donated", ""): 1,
        ("hit", ""): 1,
        ("refused", "fingerprint_differs"): 1,
        ("refused", "file_differs"): 1,
    }
    assert [verdict["verdict"] for verdict in verdicts] == ["refused", "donated", "hit", "refused", "refused"]
    assert verdicts[-1]["detail"] == "model.safetensors differs"


def test_a_report_is_kept_with_the_lease(resident: Serving) -> None:
    with resident.connect() as engine:
        attach(engine, fingerprint_of(TARGET))
        engine.report(Verdict(Outcome.HIT), {"attach": 0.004, "skeleton": 1.5})
        (lease,) = engine.status()["leases"]
        assert lease["phases_s"] == {"attach": 0.004, "skeleton": 1.5}


def test_reports_do_not_pile_up(resident: Serving) -> None:
    with resident.connect() as engine:
        attach(engine, fingerprint_of(TARGET))
        for round_number in range(20):
            phases_s = {f"{round_number} {number}": 1.0 for number in range(100)}
            engine.report(Verdict(Outcome.HIT), phases_s)
        (lease,) = engine.status()["leases"]
        assert len(lease["phases_s"]) <= 40


def test_a_hit_is_answered_before_it_is_logged(resident: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    logged = []

    def log(text: str, **fields: object) -> None:
        logged.append(answered.wait(5))

    with resident.connect() as client:
        monkeypatch.setattr(answers, "event", log)
        attach(client, fingerprint_of(TARGET))
        answered.set()
        client.status()
    assert logged[0]


def test_a_hit_that_nobody_waits_for_any_more_is_counted(resident: Serving) -> None:
    fingerprint = fingerprint_of(TARGET).to_json()
    with resident.raw() as deaf:
        deaf.shutdown(socket.SHUT_RD)
        wire.send(deaf, wire.Attach(role="target", rank=0, client="deaf", fingerprint=fingerprint))
        ended = select.poll()
        ended.register(deaf, 0)
        assert ended.poll(10_000)
    assert dict(resident.holdings.verdict_counts) == {("hit", ""): 1}
    assert not resident.holdings.leases


@pytest.mark.parametrize(
    ("verdict", "reason"), [("maybe", ""), ("", ""), ("refused", ""), ("refused", "because"), ("Hit", "")]
)
def test_a_report_of_an_unknown_verdict_ends_the_connection(resident: Serving, verdict: str, reason: str) -> None:
    with resident.raw() as channel:
        report = wire.Report(verdict=verdict, reason=reason, detail="", phases_s={})
        answer = say(channel, wire.encode(report))
        assert isinstance(answer, wire.Refused)
        assert hear(channel) is None
