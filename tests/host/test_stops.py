"""What is stopped on a real systemd: weights freed, their engine first, whatever their keeper is doing."""

import pytest

from tests.host.checkpoints import Checkpoints
from tests.host.installed import MODEL, PORT, Host
from tests.host.served import ENGINE, WEIGHTS
from tests.host.stream import ask

pytestmark = [pytest.mark.host, pytest.mark.timeout(1800)]


# What a keeper may be doing when it is stopped: settings, as in a drop-in, that have it do so after it was killed.
MOMENTS = {
    "waits to be restarted": "RestartSec=1h",
    "waits after a start that failed": "RestartSec=2s\nExecStart=\nExecStart=/bin/false",
    "starts": "ExecStart=\nExecStart=/bin/sleep inf",
    "has failed": "ExecStart=\nExecStart=/bin/sh -c 'exit 78'",
}
DROP_IN = f"/run/systemd/system/{WEIGHTS}.d/moment.conf"


def test_stopped_weights_are_freed_their_engine_first_and_stay_stopped(host: Host) -> None:
    host.machine.systemctl("stop", WEIGHTS, timeout_s=120)
    _is_stopped(host)
    engine, weights = (_stopped_at(host, unit) for unit in (ENGINE, WEIGHTS))
    assert engine <= weights
    # Nothing that watches starts them again.
    for suffix in ("path", "timer", "service"):
        host.wait_for_state(f"checkpoint@{MODEL}.{suffix}", "inactive")
    host.machine.systemctl("start", WEIGHTS, timeout_s=120)
    for suffix in ("path", "timer"):
        assert host.state(f"checkpoint@{MODEL}.{suffix}") == "active"


@pytest.mark.parametrize("moment", MOMENTS)
def test_whatever_a_keeper_is_doing_its_stop_ends_the_engine_first(host: Host, moment: str) -> None:
    engine = host.pid(ENGINE)
    host.machine.write(DROP_IN, f"[Service]\nRestartSteps=0\n{MOMENTS[moment]}\n")
    host.machine.systemctl("daemon-reload")
    try:
        host.machine.systemctl("kill", "--signal=KILL", WEIGHTS)
        host.machine.wait_for(lambda: _is_at(host, moment), what=f"the keeper {moment}")
        assert host.pid(ENGINE) == engine, "it serves what it has mapped"
        host.machine.systemctl("stop", WEIGHTS, timeout_s=120)
        _is_stopped(host)
        if moment != "has failed":
            assert _stopped_at(host, ENGINE) <= _stopped_at(host, WEIGHTS)
    finally:
        host.machine.run(["rm", DROP_IN])
        host.machine.systemctl("daemon-reload")


def test_the_target_stops_and_starts_everything(host: Host, checkpoints: Checkpoints) -> None:
    host.machine.systemctl("stop", "appliance.target", timeout_s=120)
    host.wait_for_state(WEIGHTS, "inactive")
    assert (host.state(ENGINE), host.held_bytes()) == ("inactive", 0)
    host.machine.systemctl("start", "appliance.target", timeout_s=120)
    host.wait_for_state(ENGINE)
    assert ask(PORT, MODEL) == checkpoints.answers[checkpoints.first]


def _is_at(host: Host, moment: str) -> bool:
    found = host.machine.show(WEIGHTS, "SubState", "ExecMainStatus")
    if moment == "starts":
        return found["SubState"] == "start"
    if moment == "has failed":
        return found["SubState"] == "failed"
    failed_again = found["ExecMainStatus"] == "1"
    return found["SubState"] == "auto-restart" and failed_again is (moment == "waits after a start that failed")


def _is_stopped(host: Host) -> None:
    assert host.state(WEIGHTS) in ("inactive", "failed")
    assert (host.state(ENGINE), host.held_bytes()) == ("inactive", 0)


def _stopped_at(host: Host, unit: str) -> int:
    return int(host.machine.show(unit, "InactiveEnterTimestampMonotonic")["InactiveEnterTimestampMonotonic"])
