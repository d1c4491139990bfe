"""What a keeper says of itself fits a message, whatever its clients did."""

import json

from appliance import wire
from appliance.fingerprint import Difference, Fingerprint
from appliance.keeper.holdings import Holdings, Lease
from appliance.keeper.status import EVICTED, MAX_BYTES, SHOWN_VERDICTS, root_digest, status
from appliance.verdict import Outcome, Reason, refused
from tests.keeper.shards import TARGET, Filling, shard_of, slots

FIRE = "\U0001f525"  # twelve bytes in JSON


def said(holdings: Holdings, target: Fingerprint | None = TARGET) -> dict[str, object]:
    body = status(holdings, model="m", target=target, signer="ab12")
    assert len(json.dumps(body, separators=(",", ":"))) <= MAX_BYTES
    wire.encode(wire.StatusReply(status=body))
    return body


def test_an_empty_keeper_says_what_it_is_for() -> None:
    holdings = Holdings()
    holdings.lay_out(slots())
    body = said(holdings)
    assert (body["state"], body["root_digest"], body["signer"]) == ("empty", "", "ab12")
    assert body["target_root_digest"] == TARGET.root_digest
    assert said(holdings, target=None)["target_root_digest"] == ""


def test_a_resident_shard_is_described() -> None:
    holdings = Holdings()
    holdings.lay_out(slots())
    shard = shard_of(slabs=3)
    holdings.put(shard)
    body = said(holdings)
    assert body["size_bytes"] == 3 * 4096
    assert body["shards"] == [
        {
            "role": "target",
            "rank": 0,
            "device": "cpu",
            "shard_id": shard.record.shard_id,
            "size_bytes": 3 * 4096,
            "slabs": 3,
            "phases_s": {"load": 1.5, "verify": 0.5},
            "scrub": None,
        }
    ]
    assert body["root_digest"] == root_digest(holdings) == TARGET.root_digest
    shard.close()


def test_a_refusal_comes_before_an_eviction_before_other_trouble() -> None:
    holdings = Holdings()
    holdings.lay_out(slots())
    holdings.trouble = "the loader failed"
    assert said(holdings)["trouble"] == "the loader failed"
    holdings.evicted = True
    assert said(holdings)["trouble"] == EVICTED
    holdings.refusal = "a bad signature"
    assert (said(holdings)["trouble"], said(holdings)["refused"]) == ("a bad signature", True)


def test_the_last_verdicts_are_shown() -> None:
    holdings = Holdings()
    for number in range(SHOWN_VERDICTS + 3):
        holdings.judge(refused(Reason.LEASED, str(number)), client="engine")
    shown = said(holdings)["verdicts"]
    assert isinstance(shown, list)
    assert [verdict["detail"] for verdict in shown] == ["3", "4", "5", "6", "7"]


def test_five_hundred_leases_and_verdicts_full_of_facts_still_fit() -> None:
    holdings = Holdings()
    holdings.lay_out(slots(16))
    shards = [
        shard_of(rank=rank, phases_s={f"{FIRE * 40}{number}": 1e8 / 3 for number in range(60)}) for rank in range(16)
    ]
    for shard in shards:
        holdings.put(shard)
    for number in range(512):
        phases_s = {f"{name}{FIRE * 30}": 1 / 3 for name in range(40)}
        holdings.leases.add(Lease(FIRE * 100, number, 0, "ab" * 8, Outcome.HIT, phases_s=phases_s))
    fields = tuple(Difference(FIRE * 100 + str(number), FIRE * 2048, FIRE * 2048) for number in range(256))
    for _ in range(20):
        holdings.judge(refused(Reason.FINGERPRINT_DIFFERS, FIRE * 2000, fields=fields), client=FIRE * 100)
    holdings.refusal = holdings.progress = FIRE * 10_000
    body = said(holdings)
    leases, omitted = body["leases"], body["omitted"]
    assert isinstance(leases, list)
    assert isinstance(omitted, int)
    assert len(leases) + omitted == 512
    assert omitted
    for shard in shards:
        shard.close()


def test_many_donors_with_long_names_fit_beside_many_leases() -> None:
    holdings = Holdings()
    holdings.lay_out(slots(600))
    for rank in range(600):
        holdings.set_donor(("target", rank), Filling(FIRE * 100, rank))
        holdings.leases.add(Lease(FIRE * 100, rank, 0, "ab" * 8, Outcome.HIT))
    loaders = said(holdings)["loaders"]
    assert isinstance(loaders, list)
    assert {"client": FIRE * 20, "pid": 0} in loaders


def test_the_oldest_leases_are_shown_first() -> None:
    holdings = Holdings()
    for since in (3.0, 1.0, 2.0):
        holdings.leases.add(Lease(f"at {since}", 1, 0, "ab" * 8, Outcome.HIT, since=since))
    leases = said(holdings)["leases"]
    assert isinstance(leases, list)
    assert [lease["client"] for lease in leases] == ["at 1.0", "at 2.0", "at 3.0"]


def test_a_status_fits_however_many_slabs_were_damaged() -> None:
    holdings = Holdings()
    holdings.lay_out(slots(64))
    shards = [shard_of(rank=rank, slabs=200) for rank in range(4)]
    for shard in shards:
        holdings.put(shard)
        holdings.note_scrub(shard, range(200))
    assert len(said(holdings)["shards"][0]["scrub"]["damaged"]) == 20  # type: ignore[index]
    for shard in shards:
        shard.close()
