"""Offers: who may fill a slot, and when what is in it may be replaced."""

import os
from contextlib import closing

from appliance.verdict import Reason
from tests.keeper.serving import Serving, attach, donate, give, offer, refusal_of
from tests.keeper.shards import (
    OTHER_TARGET,
    TARGET,
    donation_of,
    fingerprint_of,
)
from tests.service_manager import ServiceManager


def test_a_filled_slot_is_offered_only_for_replacement(serving: Serving) -> None:
    give(serving)
    with serving.connect() as donor:
        assert refusal_of(lambda: offer(donor))[0] is Reason.OCCUPIED
        offer(donor, replace=True)
        assert serving.holdings.shard(("target", 0)) is None


def test_what_is_leased_is_not_replaced(serving: Serving) -> None:
    give(serving)
    with serving.connect() as engine, serving.connect() as donor:
        attach(engine, fingerprint_of(TARGET))
        reason, message = refusal_of(lambda: offer(donor, replace=True))
        assert reason is Reason.LEASED
        assert "in use by engine" in message
        assert attach(engine, fingerprint_of(TARGET)) == 2


def test_what_is_replaced_is_gone_from_the_store_when_the_grant_comes(
    serving: Serving, manager: ServiceManager
) -> None:
    give(serving)
    with serving.connect() as donor:
        offer(donor, replace=True)
        assert manager.names() == []


def test_an_offer_of_other_weights_is_refused_by_naming_what_differs(serving: Serving) -> None:
    with serving.connect() as donor:
        reason, message = refusal_of(lambda: offer(donor, target=OTHER_TARGET))
        assert reason is Reason.TARGET_DIFFERS
        assert f"root_digest: wanted {'b' * 64}, held {'a' * 64}" in message


def test_nothing_is_offered_to_a_keeper_that_may_not_take_anything(serving: Serving) -> None:
    serving.target = None
    with serving.connect() as donor:
        assert refusal_of(lambda: offer(donor))[0] is Reason.NOT_RESIDENT
        serving.call(lambda: setattr(serving.holdings, "refusal", "bad signature"))
        assert refusal_of(lambda: offer(donor)) == (
            Reason.CHECKPOINT_REFUSED,
            "refused (checkpoint_refused) bad signature",
        )


def test_offering_again_over_the_same_connection_keeps_the_grant(serving: Serving) -> None:
    with serving.connect() as donor:
        offer(donor)
        offer(donor)
        with closing(donation_of()) as donation:
            donate(donor, donation)


def test_progress_of_somebody_who_fills_nothing_is_ignored(serving: Serving) -> None:
    with serving.connect() as client:
        client.progress("100 %")
        assert client.status()["progress"] == ""


def test_a_donor_is_told_as_a_loader_until_it_has_donated(serving: Serving) -> None:
    with serving.connect() as donor, closing(donation_of()) as donation:
        assert donor.status()["loaders"] == []
        offer(donor)
        assert donor.status()["loaders"] == [{"client": "donor", "pid": os.getpid()}]
        donate(donor, donation)
        status = donor.status()
        assert (status["loaders"], [lease["pid"] for lease in status["leases"]]) == ([], [os.getpid()])


def test_progress_is_one_printable_line(serving: Serving) -> None:
    with serving.connect() as donor:
        offer(donor)
        donor.progress("\x1b[2Jreading\n3 of 8" + "x" * 500)
        progress = donor.status()["progress"]
        assert progress.isprintable()
        assert progress.startswith("reading")
        assert len(progress) < 300
