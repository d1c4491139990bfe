import gc

import pytest

from appliance.collector import paused


def test_nothing_is_collected_inside_and_everything_again_afterwards() -> None:
    with paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_ends_with_an_error_too() -> None:
    with pytest.raises(KeyError), paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
