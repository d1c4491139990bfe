"""`appliance up` keeps descriptors as the real PID 1 does: one service, asked the same under both."""

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.up.description import State, UnitDescription
from appliance.up.unit import Unit
from tests.host.machine import Machine
from tests.host.stores_everything import LIMIT
from tests.up.stage import TIMEOUT_S, Stage, until

SERVICE = Path(__file__).with_name("stores_everything.py")
UNIT = f"""
[Unit]
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart=python3 -I /opt/stores_everything.py /run/%p %i
Restart=always
RestartSec=50ms
RestartPreventExitStatus=78
TimeoutStopSec=1
WatchdogSec=20
KillMode=mixed
FileDescriptorStoreMax={LIMIT}
FileDescriptorStorePreserve=restart
"""

Report = dict[str, Any]

# The first boot builds the root file system. Only this release has every setting above.
pytestmark = [pytest.mark.host, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine.boot("trixie") as machine:
        machine.copy_in(SERVICE, "/opt/stores_everything.py")
        yield machine


@pytest.mark.parametrize("manner", ["willing", "stubborn"])
def test_a_store_decides_as_pid_1_does_and_outlives_the_same_events(
    machine: Machine, manner: str, tmp_path: Path
) -> None:
    theirs, ours = under_systemd(machine, manner), under_up(tmp_path, manner)
    assert ours == theirs
    filled, killed, restarted, refused, stopped = ours
    assert filled["given"] == []
    assert len(killed["given"]) > LIMIT / 2 and killed == restarted == refused
    assert stopped["given"] == []


def under_systemd(machine: Machine, manner: str) -> list[Report]:
    """Start, kill, restart, restart with a refusal, start and stop: return what each start reported."""
    unit, folder = f"stores-{manner}@{manner}.service", f"/run/stores-{manner}"
    machine.write(f"/etc/systemd/system/stores-{manner}@.service", UNIT.replace("/run/%p", folder))
    machine.run(["mkdir", folder])
    machine.systemctl("daemon-reload")

    def report(number: int) -> Report:
        path = f"{folder}/report.{number}"
        machine.wait_for(lambda: machine.run(["test", "-e", path], check=False).returncode == 0, what=path)
        body: Report = json.loads(machine.run(["cat", path]).stdout)
        return body

    machine.systemctl("start", unit)
    reports = [report(0)]
    machine.systemctl("kill", "--signal=KILL", unit)
    reports.append(report(1))
    machine.systemctl("restart", unit)
    reports.append(report(2))
    machine.run(["touch", f"{folder}/refuse"])
    machine.systemctl("restart", unit, check=False)
    reports.append(report(3))
    assert machine.show(unit, "ActiveState", "NFileDescriptorStore") == {
        "ActiveState": "failed",
        "NFileDescriptorStore": "0",
    }
    machine.systemctl("start", unit)
    machine.systemctl("stop", unit)
    machine.systemctl("start", unit)
    reports.append(report(5))
    machine.systemctl("stop", unit)
    return [comparable(one) for one in reports]


def under_up(folder: Path, manner: str) -> list[Report]:
    """Do the same with `appliance up`'s unit."""
    shutil.copy(SERVICE, folder)
    stage = Stage(folder)
    description = UnitDescription(
        "stores",
        (sys.executable, "-I", str(folder / SERVICE.name), str(folder), manner),
        stop_timeout_s=1,
        watchdog_s=20,
        store_limit=LIMIT,
        first_restart_s=0.05,
    )

    async def report(number: int) -> Report:
        path = folder / f"report.{number}"
        await until(path.exists)
        body: Report = json.loads(path.read_text())
        return body

    async def scenario() -> list[Report]:
        unit = stage.unit(description)
        await unit.start()
        reports = [await report(0)]
        await stage.until_state(unit, State.ACTIVE)
        unit.send(signal.SIGKILL)
        reports.append(await report(1))
        await stage.until_state(unit, State.ACTIVE, starts=2)
        await unit.restart()
        reports.append(await report(2))
        await stage.until_state(unit, State.ACTIVE)
        (folder / "refuse").touch()
        await unit.restart()
        reports.append(await report(3))
        await stage.until_state(unit, State.FAILED)
        assert unit.status().stored == 0
        reports += await stopped_and_started(unit)
        return [comparable(one) for one in reports]

    async def stopped_and_started(unit: Unit) -> list[Report]:
        await unit.start()
        await stage.until_state(unit, State.ACTIVE)
        await unit.stop()
        await unit.start()
        reports = [await report(5)]
        await unit.stop()
        return reports

    return asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def comparable(report: Report) -> Report:
    # Of those that came in one message PID 1 keeps no order; here that message is the one that does not fit.
    report["given"] = [[name, "" if name == "too-many" else content] for name, content in report["given"]]
    return report
