"""The appliance on a real systemd, installed from this checkout: every event of the table, with requests under way."""

import json
import random
import time
import urllib.request

import pytest

from tests.host.checkpoints import Checkpoints
from tests.host.installed import HEALTH_PORT, MANIFEST, MODEL, OTHER_PORT, PORT, Host
from tests.host.root import RELEASES, Kind
from tests.host.served import BASE, ENGINE, OTHER, WEIGHTS, answers, health, is_back
from tests.host.stream import Stream, ask

SECOND = {"checkpoint": f"/srv/models/{OTHER}", "engine": {"port": OTHER_PORT, "threads": 1}}
MOST_EXPOSED = 4.0
KILLS = 20

# Building the root, installing torch: the first test of each host takes minutes.
pytestmark = [pytest.mark.host, pytest.mark.timeout(1800)]


def test_units_are_sound_and_shut_in(host: Host, kind: Kind) -> None:
    units = [
        WEIGHTS,
        ENGINE,
        f"engine-stop@{MODEL}.service",
        *(f"checkpoint@{MODEL}.{suffix}" for suffix in ("service", "path", "timer")),
    ]
    verified = host.machine.run(["systemd-analyze", "verify", *units, "appliance.target"])
    assert verified.stderr + verified.stdout == ""
    for unit in (WEIGHTS, ENGINE, f"checkpoint@{MODEL}.service"):
        last = host.machine.run(["systemd-analyze", "security", "--no-pager", unit]).stdout.splitlines()[-1]
        print(f"{kind}: {last}")
        assert float(last.split(":")[1].split()[0]) <= MOST_EXPOSED


def test_no_process_is_root_and_only_the_group_may_enter(host: Host) -> None:
    for unit in (WEIGHTS, ENGINE):
        assert host.machine.run(["stat", "--format=%U", f"/proc/{host.pid(unit)}"]).stdout == "appliance\n"
    socket = host.machine.run(["stat", "--format=%A %U %G", f"/run/appliance/{MODEL}/keeper.sock"]).stdout
    assert socket == "srw-rw---- appliance appliance\n"
    assert host.machine.run(["stat", "--format=%A", f"/run/appliance/{MODEL}"]).stdout == "drwxr-x---\n"


def test_a_restarted_engine_attaches_and_the_weights_stay(host: Host, checkpoints: Checkpoints) -> None:
    shards, keeper, held = host.shard_ids(), host.pid(WEIGHTS), host.held_bytes()
    with Stream(PORT, MODEL) as stream:
        host.machine.systemctl("restart", ENGINE, timeout_s=120)
        answers(host, stream, checkpoints.answers[checkpoints.first])
    print(dict(stream.outcomes))
    assert health()["verdict"] == "hit"
    assert (host.shard_ids(), host.pid(WEIGHTS), host.held_bytes()) == (shards, keeper, held)
    assert set(stream.answers) == {checkpoints.answers[checkpoints.first]}
    assert stream.failures == []


def test_an_engine_that_dies_is_back_and_attached(host: Host, checkpoints: Checkpoints) -> None:
    shards, before = host.shard_ids(), host.pid(ENGINE)
    with Stream(PORT, MODEL) as stream:
        host.machine.systemctl("kill", "--signal=KILL", ENGINE)
        is_back(host, ENGINE, before)
        answers(host, stream, checkpoints.answers[checkpoints.first])
    assert health()["verdict"] == "hit" and host.shard_ids() == shards
    assert set(stream.answers) == {checkpoints.answers[checkpoints.first]}


@pytest.mark.parametrize(
    "event",
    [("kill", "--signal=KILL", WEIGHTS), ("restart", WEIGHTS), ("daemon-reload",), ("daemon-reexec",)],
    ids=lambda event: event[0],
)
def test_a_keeper_comes_and_goes_and_nobody_notices(host: Host, checkpoints: Checkpoints, event: tuple[str]) -> None:
    shards, keeper, engine, held = host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE), host.held_bytes()
    with Stream(PORT, MODEL) as stream:
        host.machine.systemctl(*event)
        if WEIGHTS in event:
            is_back(host, WEIGHTS, keeper)
        host.machine.wait_for(lambda: bool(health()["leased"]), what="the lease is renewed")
        answers(host, stream, checkpoints.answers[checkpoints.first])
    assert (host.shard_ids(), host.pid(ENGINE), host.held_bytes()) == (shards, engine, held)
    assert set(stream.outcomes) == {"answered"}
    assert set(stream.answers) == {checkpoints.answers[checkpoints.first]}


def test_a_keeper_killed_many_times_also_while_an_engine_attaches_loses_nothing(
    host: Host, checkpoints: Checkpoints, kind: Kind
) -> None:
    shards, held = host.shard_ids(), host.held_bytes()
    chance = random.Random(7)
    with Stream(PORT, MODEL) as stream:
        for number in range(KILLS):
            if number == KILLS // 2:
                host.machine.systemctl("restart", "--no-block", ENGINE)
            # At any moment of its start, too.
            time.sleep(chance.uniform(0, 0.6))
            host.machine.systemctl("kill", "--signal=KILL", WEIGHTS, check=False)
        host.wait_for_state(WEIGHTS)
        host.wait_for_state(ENGINE)
        answers(host, stream, checkpoints.answers[checkpoints.first])
    assert host.shard_ids() == shards and host.held_bytes() == held
    assert health()["verdict"] == "hit"
    assert set(stream.answers) == {checkpoints.answers[checkpoints.first]}


@pytest.mark.parametrize("event", ["kill the loader", "kill the keeper", "daemon-reexec"])
def test_a_load_that_is_disturbed_ends_with_the_weights_once(host: Host, checkpoints: Checkpoints, event: str) -> None:
    held = host.held_bytes()
    host.machine.systemctl("stop", WEIGHTS, timeout_s=120)
    assert host.held_bytes() == 0
    host.machine.systemctl("start", "--no-block", WEIGHTS, ENGINE)
    host.machine.wait_for(lambda: bool(_loader(host)), what="the loader runs")
    if event == "daemon-reexec":
        host.machine.systemctl("daemon-reexec")
    else:
        victim = _loader(host)[0] if event == "kill the loader" else str(host.pid(WEIGHTS))
        host.machine.run(["kill", "-KILL", victim])
    host.wait_for_state(WEIGHTS)
    host.wait_for_state(ENGINE)
    assert host.held_bytes() == held and len(host.shard_ids()) == 1
    assert ask(PORT, MODEL) == checkpoints.answers[checkpoints.first]


def test_a_new_checkpoint_is_noticed_verified_and_served(host: Host, checkpoints: Checkpoints) -> None:
    held, first, second = host.held_bytes(), *checkpoints.answers.values()
    with Stream(PORT, MODEL) as stream:
        host.put_checkpoint(checkpoints.second)
        host.machine.wait_for(lambda: stream.last == second, what="the new one answers", timeout_s=180)
        host.wait_for_state(f"checkpoint@{MODEL}.service", "inactive")
        answers(host, stream, second)
    assert set(stream.answers) == {first, second} and stream.answers == sorted(
        stream.answers, key=[first, second].index
    )
    assert stream.failures == []
    assert host.held_bytes() == held and len(host.shard_ids()) == 1
    assert health()["verdict"] == "hit"


def test_a_corrupt_checkpoint_is_refused_by_name_and_the_old_one_goes_on(host: Host, checkpoints: Checkpoints) -> None:
    shards, keeper, engine = host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE)
    with Stream(PORT, MODEL) as stream:
        host.put_checkpoint(checkpoints.second)
        file = f"/srv/models/{MODEL}/model.safetensors"
        host.machine.run(["dd", "if=/dev/zero", f"of={file}", "bs=1", "seek=9000", "count=64", "conv=notrunc"])
        host.machine.wait_for(lambda: bool(host.status()["refused"]), what="it is refused", timeout_s=180)
        said = host.machine.show(WEIGHTS, "StatusText")["StatusText"], host.status()["trouble"]
        assert all("model.safetensors" in text for text in said), said
        assert "model.safetensors" in host.appliance("status").stdout
        answers(host, stream, checkpoints.answers[checkpoints.first])
    assert (host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE)) == (shards, keeper, engine)
    assert set(stream.outcomes) == {"answered"}
    assert set(stream.answers) == {checkpoints.answers[checkpoints.first]}
    assert 'appliance_checkpoint_refused{model="m"} 1.0' in _metrics()
    # Once is enough, however often it is looked at.
    host.wait_for_state(f"checkpoint@{MODEL}.service", "failed")
    found = _journal(host, "VERDICT=refused", "REASON=checkpoint_refused")
    assert found and all(entry["MODEL"] == MODEL for entry in found)
    assert any(entry.get("ROOT_DIGEST") == health()["root_digest"] for entry in found)
    assert all("\n" not in entry["MESSAGE"] for entry in found)

    # The old files are back: nothing restarts, and nothing is refused any more.
    host.put_checkpoint(checkpoints.first)
    host.machine.wait_for(lambda: not host.status()["refused"], what="it is no longer refused", timeout_s=180)
    assert (host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE)) == (shards, keeper, engine)


def test_an_engine_that_refused_what_was_there_starts_again_on_the_folder_that_is_put_back(
    host: Host, checkpoints: Checkpoints
) -> None:
    shards, keeper, place = host.shard_ids(), host.pid(WEIGHTS), f"/srv/models/{MODEL}"
    host.put_checkpoint(checkpoints.second, "broken")
    host.machine.run(["truncate", "--size=9000", "/srv/models/broken/model.safetensors"])
    # Its files keep their inodes and their times: nothing of it looks new afterwards.
    host.machine.run(["sh", "-c", f"mv {place} {place}.aside && mv /srv/models/broken {place}"])
    host.machine.wait_for(lambda: bool(host.status()["refused"]), what="it is refused", timeout_s=180)
    host.machine.systemctl("restart", ENGINE, check=False, timeout_s=120)
    host.wait_for_state(ENGINE, "failed")
    host.machine.run(["sh", "-c", f"mv {place} /srv/models/broken && mv {place}.aside {place}"])
    host.wait_for_state(ENGINE)
    assert ask(PORT, MODEL) == checkpoints.answers[checkpoints.first]
    assert (host.shard_ids(), host.pid(WEIGHTS)) == (shards, keeper) and not host.status()["refused"]


def test_a_checkpoint_that_is_being_copied_is_not_taken_for_a_broken_one(host: Host, checkpoints: Checkpoints) -> None:
    second = checkpoints.answers[checkpoints.second]
    place = f"/srv/models/{MODEL}"
    host.put_checkpoint(checkpoints.second, "arriving")
    since = host.machine.run(["date", "+%s"]).stdout.strip()
    with Stream(PORT, MODEL) as stream:
        host.machine.run(["cp", "/srv/models/arriving/model.sig", f"{place}/model.sig"])
        for _ in range(8):
            host.machine.run(["touch", f"{place}/.model.safetensors.partial"])
            time.sleep(1)  # what a slow copy is like
        host.machine.run(["rm", f"{place}/.model.safetensors.partial"])
        host.machine.run(["cp", "/srv/models/arriving/model.safetensors", f"{place}/model.safetensors"])
        host.machine.wait_for(lambda: stream.last == second, what="the new one answers", timeout_s=180)
    assert set(stream.answers) == set(checkpoints.answers.values())
    assert _journal(host, "VERDICT=refused", f"--since=@{since}") == []


def test_a_moved_port_restarts_the_engine_and_nothing_else(host: Host, checkpoints: Checkpoints) -> None:
    shards, keeper, engine = host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE)
    host.put_manifest({MODEL: BASE[MODEL] | {"engine": {"port": OTHER_PORT, "threads": 1}}})
    assert host.appliance("plan", "--check", check=False).returncode == 1
    planned = host.appliance("plan").stdout
    assert f"restart {ENGINE}: engine.port: {PORT} -> {OTHER_PORT}" in planned and f"restart {WEIGHTS}" not in planned
    assert host.pid(ENGINE) == engine, "a plan changes nothing"
    assert f"{MANIFEST} was edited" in host.appliance("status").stderr
    host.apply()
    assert not host.appliance("status").stderr
    assert host.appliance("plan", "--check").returncode == 0
    assert ask(OTHER_PORT, MODEL) == checkpoints.answers[checkpoints.first]
    assert (host.shard_ids(), host.pid(WEIGHTS)) == (shards, keeper) and host.pid(ENGINE) != engine


def test_a_broken_manifest_changes_nothing(host: Host) -> None:
    shards, keeper, engine = host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE)
    files = _unit_files(host)
    host.machine.write(MANIFEST, "models: {m: {checkpoint: /srv/models/m, engine: {prot: 1}}}\n")
    for command in ("plan", "apply"):
        done = host.appliance(command, check=False)
        assert done.returncode == 78 and f"{MANIFEST}:1:" in done.stderr
    assert _unit_files(host) == files
    # What runs is shown all the same, below what is wrong.
    done = host.appliance("status", check=False)
    assert done.returncode == 78 and f"{MANIFEST}:1:" in done.stderr and "resident" in done.stdout
    # So is what runs acted on: this is refused for the engine's lease, not for the slip.
    done = host.appliance("evict", MODEL, check=False)
    assert done.returncode == 75 and "use --force" in done.stderr
    # Not even a restart of the keeper reads it: an edit counts once it is applied.
    host.machine.systemctl("restart", WEIGHTS)
    assert (host.shard_ids(), host.pid(ENGINE)) == (shards, engine) and host.pid(WEIGHTS) != keeper


@pytest.mark.parametrize("kind", ["bookworm"], indirect=True, scope="session")
def test_a_host_that_cannot_run_containers_says_so_and_changes_nothing(host: Host) -> None:
    files, engine = _unit_files(host), host.pid(ENGINE)
    contained = {"port": PORT, "runtime": "podman", "image": "localhost/engine:1"}
    host.put_manifest({MODEL: BASE[MODEL] | {"engine": contained}})
    done = host.appliance("apply", check=False)
    assert done.returncode == 71 and "there is no Podman here" in done.stderr
    # What this release's Podman says of itself, which has no Quadlet.
    host.machine.run(["sh", "-c", "printf '#!/bin/sh\\necho podman version 4.3.1\\n' >/usr/local/bin/podman"])
    host.machine.run(["chmod", "755", "/usr/local/bin/podman"])
    try:
        done = host.appliance("apply", check=False)
    finally:
        host.machine.run(["rm", "/usr/local/bin/podman"])
    assert done.returncode == 71 and "Podman 4.3 has no Quadlet" in done.stderr and "5.0" in done.stderr
    assert (_unit_files(host), host.pid(ENGINE)) == (files, engine)


def test_of_two_models_one_is_removed_and_freed_and_the_other_never_notices(
    host: Host, checkpoints: Checkpoints
) -> None:
    held, engine = host.held_bytes(), host.pid(ENGINE)
    with Stream(PORT, MODEL) as stream:
        host.put_checkpoint(checkpoints.second, OTHER)
        host.put_manifest(BASE | {OTHER: SECOND})
        host.apply()
        assert ask(OTHER_PORT, OTHER) == checkpoints.answers[checkpoints.second]
        assert host.held_bytes() == 2 * held
        host.put_manifest(BASE)
        host.apply()
        for unit in (f"weights@{OTHER}.service", f"engine@{OTHER}.service", f"checkpoint@{OTHER}.path"):
            host.wait_for_state(unit, "inactive")
        assert host.held_bytes() == held and host.pid(ENGINE) == engine
    assert set(stream.outcomes) == {"answered"}
    assert set(stream.answers) == {checkpoints.answers[checkpoints.first]}


def test_restart_proves_that_the_engine_came_back_the_same(host: Host) -> None:
    timeline = json.loads(host.appliance("restart", MODEL, "--json").stdout)
    assert timeline["verdict"] == "hit" and timeline["canary"] == "16 tokens as recorded"
    assert timeline["steps_s"] and timeline["phases_s"]
    folder = "/var/lib/appliance/canary"
    host.machine.run(["sh", "-c", f'sed --in-place=.kept \'s/"token_ids": .[0-9]*/"token_ids": [0/\' {folder}/*.json'])
    try:
        done = host.appliance("restart", MODEL, check=False)
        assert done.returncode == 77 and "recorded at the first load" in done.stderr
    finally:
        host.machine.run(["sh", "-c", f'for f in {folder}/*.kept; do mv "$f" "${{f%.kept}}"; done'])


def test_doctor_says_what_this_systemd_cannot_do(host: Host, kind: Kind) -> None:
    done = host.appliance("doctor", "--json", check=False)
    findings = json.loads(done.stdout)
    systemd = next(finding for finding in findings if finding["what"].startswith("systemd"))
    assert systemd["level"] == ("note" if RELEASES[kind].systemd < 254 else "ok"), systemd
    assert [finding for finding in findings if finding["level"] == "FAIL"] == []
    assert done.returncode == 0
    assert all(finding["fix"] for finding in findings if finding["level"] != "ok")


def test_a_reboot_loads_from_disk_and_serves(host: Host, checkpoints: Checkpoints) -> None:
    shards = host.shard_ids()
    host.machine.reboot()
    host.wait_for_state(ENGINE)
    assert ask(PORT, MODEL) == checkpoints.answers[checkpoints.first]
    assert len(host.shard_ids()) == 1 and host.shard_ids() != shards


def _metrics() -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{HEALTH_PORT}/metrics", timeout=30) as response:
        text: str = response.read().decode()
    return text


def _journal(host: Host, *matches: str) -> list[dict[str, str]]:
    printed = host.machine.run(["journalctl", "--no-pager", "--output=json", *matches], check=False).stdout
    return [json.loads(line) for line in printed.splitlines()]


def _loader(host: Host) -> list[str]:
    return host.machine.run(["pgrep", "--full", "appliance[.]loader"], check=False).stdout.split()


def _unit_files(host: Host) -> str:
    return host.machine.run(
        ["grep", "--recursive", "", "/etc/systemd/system", "/var/lib/appliance-host"], check=False
    ).stdout
