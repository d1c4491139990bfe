from appliance.up.deadlines import Deadlines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(watchdog_s: float | None = None) -> tuple[Clock, Deadlines]:
    clock = Clock()
    return clock, Deadlines(clock, watchdog_s=watchdog_s)


def test_nothing_is_overdue_before_anything_was_allowed() -> None:
    clock, deadlines = made(watchdog_s=1)
    clock.now += 1000
    assert not deadlines.overdue and not deadlines.starved and deadlines.next is None


def test_it_is_overdue_from_the_moment_that_was_allowed() -> None:
    clock, deadlines = made()
    deadlines.allow(5)
    assert deadlines.next == 105
    clock.now = 104.9
    assert not deadlines.overdue
    clock.now = 105
    assert deadlines.overdue


def test_an_extension_counts_from_now_and_takes_nothing_away() -> None:
    clock, deadlines = made()
    deadlines.allow(5)
    clock.now = 104
    deadlines.extend(0.1)
    assert deadlines.next == 105
    deadlines.extend(10)
    assert deadlines.next == 114


def test_what_has_no_deadline_gets_none_by_an_extension() -> None:
    _, deadlines = made()
    deadlines.extend(10)
    assert deadlines.next is None
    deadlines.allow(5)
    deadlines.allow(None)
    deadlines.extend(10)
    assert deadlines.next is None


def test_the_watchdog_starves_unless_it_is_fed_again() -> None:
    clock, deadlines = made(watchdog_s=2)
    deadlines.feed()
    clock.now = 101.9
    deadlines.feed()
    clock.now = 103.8
    assert not deadlines.starved
    clock.now = 103.9
    assert deadlines.starved


def test_the_nearer_of_both_is_next() -> None:
    _, deadlines = made(watchdog_s=2)
    deadlines.allow(5)
    deadlines.feed()
    assert deadlines.next == 102


def test_without_a_watchdog_feeding_means_nothing() -> None:
    _, deadlines = made()
    deadlines.feed()
    assert deadlines.next is None


def test_the_process_may_change_its_watchdog_or_starve_it() -> None:
    clock, deadlines = made(watchdog_s=2)
    deadlines.change_watchdog(7)
    deadlines.feed()
    assert deadlines.next == 107
    deadlines.starve()
    assert deadlines.starved
    deadlines.change_watchdog(0)
    deadlines.feed()
    clock.now += 1000
    assert not deadlines.starved


def test_an_unwatched_process_is_never_bitten() -> None:
    clock, deadlines = made(watchdog_s=2)
    deadlines.feed()
    deadlines.leave_unwatched()
    clock.now += 1000
    assert not deadlines.starved
