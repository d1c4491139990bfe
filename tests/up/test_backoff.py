from appliance.up.backoff import Backoff


def delays(backoff: Backoff, *ran_s: float) -> list[float]:
    return [backoff.delay_s(seconds) for seconds in ran_s]


def test_each_short_run_doubles_the_delay_up_to_the_slowest() -> None:
    backoff = Backoff(first_s=0.1, slowest_s=1.0, ran_well_s=10)
    assert delays(backoff, *[0] * 6) == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_run_that_went_well_starts_over() -> None:
    backoff = Backoff(first_s=0.1, slowest_s=1.0, ran_well_s=10)
    assert delays(backoff, 0, 0, 9.9, 10, 0) == [0.1, 0.2, 0.4, 0.1, 0.2]


def test_a_start_that_was_asked_for_starts_over() -> None:
    backoff = Backoff(first_s=0.1, slowest_s=1.0, ran_well_s=10)
    delays(backoff, 0, 0, 0)
    backoff.reset()
    assert delays(backoff, 0) == [0.1]
