"""A keeper's start, in every combination of what it is given back, what the checkpoint is, and what the loader does."""

import asyncio
from dataclasses import dataclass

import pytest

from appliance.errors import EXIT_CONFIG, EXIT_TRUST
from tests.keeper.shards import OTHER_TARGET, TARGET, shard_of
from tests.keeper.stage import Stage, given_back, living, set_up, stored
from tests.service_manager import ServiceManager

NEW = TARGET.root_digest


OLD = OTHER_TARGET.root_digest


GIVEN = ("nothing", "the same", "another", "a part")


CHECKPOINT = ("fine", "refused", "broken manifest", "corrupt")


LOADER = ("works", "fails once", "refuses")


@dataclass(frozen=True)
class Outcome:
    """What must have happened once a keeper has settled."""

    exit_status: int | None
    ready: bool
    held: frozenset[tuple[str, int]]
    refused: bool
    loads: int


def outcome(given: str, checkpoint: str, loader: str) -> Outcome:
    """Return what must happen: old weights go only for a new checkpoint that was verified."""
    had = {
        "nothing": frozenset[tuple[str, int]](),
        "the same": frozenset({(NEW, 0), (NEW, 1)}),
        "another": frozenset({(OLD, 0), (OLD, 1)}),
        "a part": frozenset({(NEW, 0)}),
    }[given]
    if checkpoint in ("refused", "broken manifest"):
        if not had:
            return Outcome(EXIT_TRUST if checkpoint == "refused" else EXIT_CONFIG, False, had, False, 0)
        return Outcome(None, len(had) == 2, had, True, 0)
    if given == "another" and checkpoint == "corrupt":
        return Outcome(None, True, had, True, 0)
    if given == "the same":
        return Outcome(None, True, had, False, 0)
    kept = had if given == "a part" else frozenset()
    if loader == "refuses":
        return Outcome(None if kept else EXIT_TRUST, False, kept, bool(kept), 1)
    return Outcome(None, True, frozenset({(NEW, 0), (NEW, 1)}), False, 1 if loader == "works" else 2)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("loader", LOADER)
def test_every_start_ends_as_it_must(
    stage: Stage, manager: ServiceManager, given: str, checkpoint: str, loader: str
) -> None:
    handed_over = given_back(stage, manager, given)
    set_up(stage, checkpoint, loader)
    seen: list[Outcome] = []

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            refused = bool(life.holdings.refusal)
            held = frozenset(life.held if life.exit_status is None else ())
            seen.append(Outcome(life.exit_status, manager.heard("READY=1"), held, refused, stage.loads))
            if life.exit_status is None:
                await life.stop()
                assert life.exit_status == 0

    asyncio.run(live())
    expected = outcome(given, checkpoint, loader)
    assert seen == [expected]
    # What the service manager has is what is held, so the next life begins where this one ended.
    shards = [name for name in manager.names() if name.endswith(".record")]
    assert len(shards) == len(expected.held)
    assert len(manager.names()) == 4 * len(shards) + ("w1.settings" in manager.names())
    assert ("verify" in stage.asked) == (given == "another" and checkpoint in ("fine", "corrupt"))


def test_without_stored_settings_a_broken_manifest_ends_a_keeper_whatever_it_was_given(
    stage: Stage, manager: ServiceManager
) -> None:
    handed_over = stored(manager, shard_of(TARGET, rank=0), settings=None)
    stage.will_obtain(status=EXIT_CONFIG)

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            assert life.exit_status == EXIT_CONFIG

    asyncio.run(live())


def test_stored_settings_of_another_version_are_of_no_use_and_do_no_harm(stage: Stage, manager: ServiceManager) -> None:
    handed_over = stored(manager, shard_of(TARGET, rank=0), shard_of(TARGET, rank=1), settings={"v": 7})

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            assert life.held == {(NEW, 0), (NEW, 1)}
            assert manager.heard("READY=1")

    asyncio.run(live())
