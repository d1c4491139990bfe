"""Engines in containers on a real host: the same engine@MODEL, attached to the keeper of the host."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.host.containers import QUADLETS, ContainerHost
from appliance.host.unit_files import unit_files
from appliance.host.unit_text import Link
from tests.host.checkpoints import Checkpoints
from tests.host.images import BASE as BASE_IMAGE
from tests.host.images import IMAGE, OURS, added, build_engine_image, build_image
from tests.host.installed import CHECKOUT, MODEL, OTHER_PORT, PORT, Host
from tests.host.machine import Completed
from tests.host.served import BASE, ENGINE, WEIGHTS, answers, health, is_back, serves
from tests.host.stream import Stream, ask
from tests.systemd.manifests import SOURCE, manifest_of

CONTAINER = f"engine-{MODEL}"
CONTAINED: dict[str, Any] = {
    MODEL: BASE[MODEL] | {"engine": {"port": PORT, "threads": 1, "runtime": "podman", "image": IMAGE}}
}
GUIDE, TEMPLATE = (CHECKOUT / "container" / name for name in ("README.md", "engine@.container"))
FOLDERS = (f"/run/appliance/{MODEL}", "/var/lib/appliance-host", f"/srv/models/{MODEL}", "/etc/appliance/trust")
# What any client of a keeper sees, without the seconds that torch takes.
CONNECT = f"""
from pathlib import Path
from appliance.client import KeeperClient
with KeeperClient.connect(Path("/run/appliance/{MODEL}/keeper.sock")) as client:
    print(client.status()["state"])
"""

# A GPU for Podman: a device node that no container has unless it is given one, and that anybody may open.
GPU, NODE = "GPU-8a6f0c6b-7d2e-4c55-9c1b-0f3a5d1e2b4c", "/dev/nvidia0"
CDI = f"""
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
  - name: {GPU}
    containerEdits:
      deviceNodes: [{{path: {NODE}, type: c, major: 1, minor: 11, fileMode: 0o666, permissions: rw}}]
"""

# The other release has no Podman.
pytestmark = [
    pytest.mark.host,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("kind", ["trixie"], indirect=True, scope="session"),
]


@pytest.fixture(scope="module")
def podman(installed: Host, checkpoints: Checkpoints) -> Iterator[Host]:
    """A host with the engine's image, which has native engines again afterwards."""
    build_engine_image(installed)
    if not serves(installed, checkpoints):
        installed.put_checkpoint(checkpoints.first)
        installed.put_manifest(BASE)
        installed.apply()
    yield installed
    installed.put_manifest(BASE)
    installed.apply()
    installed.machine.run(["podman", "rm", "--all", "--force", "--time=0"])


@pytest.fixture
def host(podman: Host, checkpoints: Checkpoints) -> Host:
    """A host that serves the first checkpoint from a container."""
    podman.put_manifest(CONTAINED)
    podman.apply()
    if podman.state(ENGINE) != "active":
        podman.machine.systemctl("reset-failed", check=False)
        podman.machine.systemctl("start", WEIGHTS, ENGINE, timeout_s=120)
    assert serves(podman, checkpoints)
    return podman


def test_the_image_adds_our_package_to_its_base_and_nothing_else(podman: Host) -> None:
    paths, size_bytes = added(podman, IMAGE, BASE_IMAGE)
    assert paths and not [path for path in paths if not OURS.search(path)] and size_bytes < 5_000_000
    [found] = json.loads(podman.machine.run(["podman", "image", "inspect", IMAGE]).stdout)
    assert found["Labels"]["org.opencontainers.image.title"] == "appliance engine" and found["User"] == "65532:65532"
    assert found["Healthcheck"]["Test"][:4] == ["CMD", "python3", "-m", "appliance.engine.alive"]


def test_an_engine_moves_into_a_container_and_attaches(podman: Host, checkpoints: Checkpoints) -> None:
    shards, keeper, held = podman.shard_ids(), podman.pid(WEIGHTS), podman.held_bytes()
    podman.put_manifest(CONTAINED)
    planned = podman.appliance("plan").stdout
    assert f"restart {ENGINE}: " in planned and "engine.runtime: native -> podman\n" in planned
    assert f"restart {WEIGHTS}" not in planned
    podman.apply()
    assert podman.appliance("plan", "--check").returncode == 0
    assert health()["verdict"] == "hit"
    assert ask(PORT, MODEL) == checkpoints.answers[checkpoints.first]
    assert (podman.shard_ids(), podman.pid(WEIGHTS), podman.held_bytes()) == (shards, keeper, held)


def test_a_restarted_container_comes_back_attached(host: Host, checkpoints: Checkpoints) -> None:
    shards, before = host.shard_ids(), _container_id(host)
    with Stream(PORT, MODEL) as stream:
        host.machine.systemctl("restart", ENGINE, timeout_s=120)
        answers(host, stream, checkpoints.answers[checkpoints.first])
    assert health()["verdict"] == "hit" and health()["leased"]
    assert host.shard_ids() == shards and _container_id(host) != before
    assert set(stream.answers) == {checkpoints.answers[checkpoints.first]} and stream.failures == []
    # Its lines are in the journal as those of a process of the host.
    found = host.machine.run(["journalctl", "--output=json", "VERDICT=hit", f"_SYSTEMD_UNIT={ENGINE}"]).stdout
    assert json.loads(found.splitlines()[-1])["ROOT_DIGEST"] == health()["root_digest"]


def test_a_container_is_shut_in(host: Host) -> None:
    [found] = json.loads(host.machine.run(["podman", "inspect", CONTAINER]).stdout)
    assert not found["EffectiveCaps"] and found["HostConfig"]["ReadonlyRootfs"]
    assert not found["HostConfig"]["Privileged"] and "no-new-privileges" in found["HostConfig"]["SecurityOpt"]
    namespaces = "for name in pid ipc mnt; do readlink /proc/{}/ns/$name; done"
    pid = found["State"]["Pid"]
    inside, outside = (host.machine.run(["sh", "-c", namespaces.format(of)]).stdout.split() for of in (pid, 1))
    assert not set(inside) & set(outside)
    assert host.machine.run(["stat", "--format=%U", f"/proc/{pid}"]).stdout == "appliance\n"
    writable = {mount["Destination"] for mount in found["Mounts"] if mount["RW"]}
    assert writable == {f"/var/cache/appliance/{MODEL}", "/var/lib/appliance", "/run/systemd/journal/socket"}
    assert host.machine.run(["podman", "healthcheck", "run", CONTAINER]).returncode == 0


def test_a_whole_file_makes_the_same_unit_as_a_link_and_a_drop_in(podman: Host, tmp_path: Path) -> None:
    made = []
    for version in ((5, 4), (4, 9)):
        known = ContainerHost(version, uid=996, gid=996, group=None, template=TEMPLATE.read_text())
        manifest = manifest_of(tmp_path, {MODEL: CONTAINED[MODEL] | {"wait": "90s"}})
        folder = f"/srv/quadlets-{version[0]}"
        for path, content in unit_files(manifest, SOURCE, {}, containers=known).items():
            if path.is_relative_to(QUADLETS):
                place = f"{folder}/{path.relative_to(QUADLETS)}"
                if isinstance(content, Link):
                    podman.machine.run(["mkdir", "--parents", folder])
                    podman.machine.run(["ln", "--symbolic", content.to, place])
                else:
                    podman.machine.write(place, content)
        generator = "/usr/lib/systemd/system-generators/podman-system-generator"
        done = podman.machine.run([generator, "-dryrun"], environment={"QUADLET_UNIT_DIRS": folder})
        settings = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line and line[0] != "#")
        made.append({name: settings[name] for name in ("ExecStart", "TimeoutStartSec", "Restart", "Type", "Wants")})
    assert made[0] == made[1] and made[0]["TimeoutStartSec"] == "690s" and IMAGE in made[0]["ExecStart"]


@pytest.mark.parametrize("event", ["conmon is killed", "the payload is killed", "podman rm"])
def test_a_container_that_dies_is_back_and_attached(host: Host, checkpoints: Checkpoints, event: str) -> None:
    shards, before = host.shard_ids(), host.pid(ENGINE)
    if event == "podman rm":
        host.machine.run(["podman", "rm", "--force", "--time=0", CONTAINER])
    else:
        payload = host.machine.run(["podman", "inspect", "--format={{.State.Pid}}", CONTAINER]).stdout.strip()
        host.machine.run(["kill", "-KILL", str(before) if event == "conmon is killed" else payload])
    is_back(host, ENGINE, before)
    assert health()["verdict"] == "hit" and host.shard_ids() == shards
    assert ask(PORT, MODEL) == checkpoints.answers[checkpoints.first]
    assert len(host.machine.run(["podman", "ps", "--quiet"]).stdout.split()) == 1


def test_a_container_does_not_notice_its_keeper_or_a_reload(host: Host, checkpoints: Checkpoints) -> None:
    shards, keeper, engine = host.shard_ids(), host.pid(WEIGHTS), host.pid(ENGINE)
    with Stream(PORT, MODEL) as stream:
        host.machine.systemctl("kill", "--signal=KILL", WEIGHTS)
        is_back(host, WEIGHTS, keeper)
        host.machine.systemctl("daemon-reload")
        host.machine.wait_for(lambda: bool(health()["leased"]), what="the lease is renewed")
        answers(host, stream, checkpoints.answers[checkpoints.first])
    assert (host.shard_ids(), host.pid(ENGINE)) == (shards, engine)
    assert set(stream.outcomes) == {"answered"}


def test_a_device_that_cdi_describes_is_not_lost_over_a_reload(host: Host) -> None:
    as_root = ["podman", "run", "--rm", "--network=none", "--cap-add=mknod", "--user=0:0", "--entrypoint=sh", IMAGE]
    done = host.machine.run([*as_root, "-c", "mknod /made c 1 11 && : >/made"], check=False)
    assert "Operation not permitted" in done.stderr, "without a grant it cannot be opened here"
    host.machine.write("/etc/cdi/nvidia.yaml", CDI)
    mine = f"/etc/containers/systemd/engine@{MODEL}.container.d/50-mine.conf"
    host.machine.write(mine, f"[Container]\nAddDevice=nvidia.com/gpu={GPU}\n")
    host.machine.systemctl("daemon-reload")
    try:
        host.machine.systemctl("restart", ENGINE, timeout_s=120)
        engine = host.pid(ENGINE)
        for verb in ("daemon-reload", "daemon-reexec"):
            host.machine.systemctl(verb)
            host.machine.run(["podman", "exec", CONTAINER, "sh", "-c", f": >{NODE}"])
        assert host.pid(ENGINE) == engine and health()["verdict"] == "hit"
    finally:
        host.machine.run(["rm", "-r", "/etc/cdi", mine])
        host.machine.systemctl("daemon-reload")


def test_an_image_that_is_replaced_counts_from_the_next_restart_on(host: Host) -> None:
    before, container = _image_id(host), _container_id(host)
    build_image(host, IMAGE, f"FROM {IMAGE}", "LABEL built=again")
    assert (_image_id(host), _container_id(host)) == (before, container)
    timeline = json.loads(host.appliance("restart", MODEL, "--json").stdout)
    assert timeline["verdict"] == "hit" and timeline["canary"] == "16 tokens as recorded"
    assert _image_id(host) != before


def test_another_checkpoint_in_its_place_is_refused(host: Host, checkpoints: Checkpoints) -> None:
    host.put_checkpoint(checkpoints.second, "second")
    folders = [folder for folder in FOLDERS if not folder.startswith("/srv")]
    done = _run(host, folders, f"--volume=/srv/models/second:/srv/models/{MODEL}:ro", model=MODEL)
    assert done.returncode == 69, done.stderr
    assert "root_digest: " in done.stderr


def test_without_the_socket_or_the_right_to_it_the_message_says_what_to_set(host: Host) -> None:
    done = _run(host, FOLDERS[1:], code=CONNECT)
    assert done.returncode != 0 and "no keeper answers" in done.stderr and "mounted" in done.stderr
    done = _run(host, FOLDERS, "--user=12345:12345", code=CONNECT)
    assert "not permitted to connect" in done.stderr and "--group-add" in done.stderr
    done = _run(host, FOLDERS, "--user=12345:12345", f"--group-add={_gid(host)}", code=CONNECT)
    assert done.stdout == "resident\n", done.stderr


def test_a_user_namespace_of_its_own_needs_the_group_mapped(host: Host) -> None:
    ranges = "grep --quiet ^containers: /etc/sub$1 || echo containers:300000:65536 >>/etc/sub$1"
    for kind in ("uid", "gid"):
        host.machine.run(["sh", "-c", ranges, "sh", kind])
    gid = _gid(host)
    done = _run(host, FOLDERS, "--userns=auto", f"--user={gid}:{gid}", code=CONNECT)
    assert "not permitted to connect" in done.stderr and "gidmapping=GID:GID:1" in done.stderr
    mapped = f"--userns=auto:gidmapping={gid}:{gid}:1"
    done = _run(host, FOLDERS, mapped, "--user=0:0", f"--group-add={gid}", code=CONNECT)
    assert done.stdout == "resident\n", done.stderr


@pytest.mark.parametrize(("name", "ranges", "user"), [("alice", "of her own", "65532:65532"), ("bob", "none", "0:0")])
def test_rootless_podman_attaches_if_its_user_is_in_the_group(host: Host, name: str, ranges: str, user: str) -> None:
    # Images are each user's own: the one there is, mounted.
    home = f"/srv/{name}"
    host.machine.run(["useradd", "--create-home", f"--home-dir={home}", name])
    if ranges == "none":
        host.machine.run(["sed", "--in-place", f"/^{name}:/d", "/etc/subuid", "/etc/subgid"])
    mount = f"mkdir -p /srv/root && mount --bind $(podman image mount {IMAGE}) /srv/root"
    host.machine.run(["sh", "-c", mount])
    try:
        python = host.machine.run(["readlink", "-f", "/opt/appliance/current"]).stdout.strip() + "/bin/python3"
        run = f"""
            export HOME={home} XDG_RUNTIME_DIR={home}
            cd
            exec podman --cgroup-manager=cgroupfs --storage-driver=vfs run --cgroups=disabled --rm --network=host \\
                --read-only --cap-drop=all --user={user} --group-add=keep-groups \\
                --volume={FOLDERS[0]}:{FOLDERS[0]}:ro --rootfs /srv/root {python} -c "$1"
        """
        rootless = ["setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups", "sh", "-c", run, "sh", CONNECT]
        done = host.machine.run(rootless, check=False)
        assert "not permitted to connect" in done.stderr and "keep-groups" in done.stderr
        host.machine.run(["usermod", "--append", "--groups", "appliance", name])
        assert host.machine.run(rootless).stdout == "resident\n"
    finally:
        host.machine.run(["umount", "/srv/root"])
        host.machine.run(["podman", "image", "unmount", IMAGE])


def test_two_containers_share_one_shard_and_its_memory(host: Host, checkpoints: Checkpoints) -> None:
    held = host.held_bytes()
    other = {MODEL: BASE[MODEL] | {"engine": {"port": OTHER_PORT, "threads": 1}}}
    host.machine.write("/srv/second/appliance.yaml", yaml.safe_dump({"models": other}))
    command = _guide(r"^podman run .*?--model \S+$").replace("--rm", "--detach --rm --name=second", 1)
    command = command.replace("/var/lib/appliance-host", "/srv/second")
    host.machine.run(["sh", "-c", command])
    try:
        host.machine.wait_for(lambda: len(host.status()["leases"]) == 2, what="both attached")
        answer = checkpoints.answers[checkpoints.first]
        host.machine.wait_for(lambda: _answer(OTHER_PORT) == answer, what="the second one answers")
        assert ask(PORT, MODEL) == answer
        assert host.held_bytes() == held and {lease["verdict"] for lease in host.status()["leases"]} == {"hit"}
    finally:
        host.machine.run(["podman", "rm", "--force", "--time=0", "second"])


def test_the_pod_of_the_guide_attaches(host: Host, checkpoints: Checkpoints) -> None:
    # No catatonit here, which a pod's first process would be.
    build_image(host, "localhost/pause", f"FROM {BASE_IMAGE}", 'CMD ["sleep", "inf"]')
    host.machine.write("/etc/containers/containers.conf.d/pause.conf", '[engine]\ninfra_image="localhost/pause"\n')
    pod = _guide(r"^apiVersion: v1$.*?(?=^```)").replace("996", _gid(host))
    host.machine.write("/srv/pod.yaml", pod)
    host.machine.systemctl("stop", ENGINE)
    try:
        host.machine.run(["podman", "kube", "play", "/srv/pod.yaml"])
        answer = checkpoints.answers[checkpoints.first]
        host.machine.wait_for(lambda: _answer(PORT) == answer, what="the pod answers")
        assert health()["verdict"] == "hit"
    finally:
        host.machine.run(["podman", "pod", "rm", "--all", "--force", "--time=0"])


def test_stopped_weights_stop_their_container_first(host: Host) -> None:
    host.machine.systemctl("stop", WEIGHTS, timeout_s=120)
    assert (host.state(ENGINE), host.held_bytes()) == ("inactive", 0)
    assert host.machine.run(["podman", "ps", "--all", "--quiet"]).stdout == ""


def test_a_reboot_starts_the_container_when_its_weights_are_there(host: Host, checkpoints: Checkpoints) -> None:
    host.machine.reboot()
    host.wait_for_state(ENGINE)
    assert ask(PORT, MODEL) == checkpoints.answers[checkpoints.first]
    assert health()["verdict"] == "hit"


def test_a_container_leaves_nothing_when_its_engine_is_a_process_again(host: Host, checkpoints: Checkpoints) -> None:
    shards = host.shard_ids()
    host.put_manifest(BASE)
    host.apply()
    assert ask(PORT, MODEL) == checkpoints.answers[checkpoints.first] and host.shard_ids() == shards
    assert host.machine.run(["podman", "ps", "--all", "--quiet"]).stdout == ""
    left = host.machine.run(["find", "/etc/containers/systemd", "-name", "engine*"]).stdout
    assert left == ""


def _run(host: Host, folders: tuple[str, ...] | list[str], *options: str, code: str = "", model: str = "") -> Completed:
    """Run a container that sees these folders, as the host's appliance unless `options` say otherwise."""
    user = [] if any(option.startswith("--user=") for option in options) else [f"--user={_uid(host)}:{_gid(host)}"]
    volumes = [f"--volume={folder}:{folder}:ro" for folder in folders]
    command = ["--entrypoint=python3", IMAGE, "-c", code] if code else [IMAGE]
    if model:
        command += ["--manifest", "/var/lib/appliance-host/appliance.yaml", "--model", model]
    shared = ["--rm", "--network=host", "--read-only", "--cap-drop=all"]
    return host.machine.run(["podman", "run", *shared, *user, *volumes, *options, *command], check=False)


def _guide(pattern: str) -> str:
    """Return what the guide says to type, for this model."""
    found = re.search(pattern, GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0].replace("support-bot", MODEL)


def _answer(port: int) -> str:
    try:
        return ask(port, MODEL)
    except OSError:
        return ""


def _uid(host: Host) -> str:
    return host.machine.run(["id", "--user", "appliance"]).stdout.strip()


def _gid(host: Host) -> str:
    return host.machine.run(["id", "--group", "appliance"]).stdout.strip()


def _container_id(host: Host) -> str:
    return host.machine.run(["podman", "inspect", "--format={{.Id}}", CONTAINER]).stdout


def _image_id(host: Host) -> str:
    return host.machine.run(["podman", "inspect", "--format={{.Image}}", CONTAINER]).stdout
