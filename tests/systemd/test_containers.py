import dataclasses
import os
import pwd
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from appliance.errors import HostError
from appliance.host.apply import write_files
from appliance.host.containers import TEMPLATE, ContainerHost, container_host
from appliance.host.plan import Plan, Verb, make_plan
from appliance.host.unit_files import unit_files
from appliance.host.unit_text import Files, Link
from appliance.inventory import Gpu
from tests.systemd.manifests import SOURCE, UNITS, manifest_of, model, settings_of

SHIPPED = UNITS.parent / "container/engine@.container"
HOST = ContainerHost(version=(5, 4), uid=990, gid=991, group=None)
QUADLETS = PurePosixPath("etc/containers/systemd")
DROP_IN = QUADLETS / "engine@m.container.d/10-appliance.conf"
IMAGE = "localhost/engine:1"


def contained(port: int = 8001, **settings: Any) -> dict[str, Any]:
    engine = {"runtime": "podman", "image": IMAGE, **settings.pop("engine", {})}
    return model(port, **settings, engine=engine)


def files_of(folder: Path, models: dict[str, Any], *, host: ContainerHost = HOST, **settings: Any) -> Files:
    gpus = {"0": Gpu(index=0, uuid="GPU-x", model="H200", minor=4)}
    return unit_files(manifest_of(folder, models, **settings), SOURCE, gpus, containers=host)


def test_a_container_gets_quadlet_files_instead_of_a_drop_in_of_its_unit(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"m": contained(), "n": model(8002)})
    assert files[QUADLETS / "engine@m.container"] == Link(str(TEMPLATE))
    links = PurePosixPath("etc/systemd/system/appliance.target.wants")
    assert files[links / "engine@m.service"] == Link("/run/systemd/generator/engine@m.service")
    assert PurePosixPath("etc/systemd/system/engine@m.service.d/10-appliance.conf") not in files
    assert PurePosixPath("etc/systemd/system/weights@m.service.d/10-appliance.conf") in files
    settings = settings_of(files[DROP_IN])
    for setting in (("Image", IMAGE), ("User", "990"), ("Group", "991"), ("SourcePath", str(SOURCE))):
        assert setting in settings
    assert [path for path in files if path.is_relative_to(QUADLETS) and "@n" in str(path)] == []


def test_a_container_sees_the_checkpoint_and_the_keys_and_writes_to_neither(tmp_path: Path) -> None:
    directories = {"runtime": "/srv/run", "state": "/srv/state"}
    trust = {"keys": ["/srv/100%.pub"]}
    settings = settings_of(files_of(tmp_path, {"m": contained()}, directories=directories, trust=trust)[DROP_IN])
    assert [value for name, value in settings if name == "Volume"] == [
        "/srv/models/8001:/srv/models/8001:ro",
        "/srv/100%%.pub:/srv/100%%.pub:ro",
        "/srv/run/m:/srv/run/m:ro",
        "/srv/state:/srv/state",
    ]


def test_a_container_sees_the_drafts_checkpoint_and_writes_to_a_cache_of_the_manifests_own(tmp_path: Path) -> None:
    models = {"m": contained(draft={"checkpoint": "/srv/draft", "tokens": 2}, engine={"kind": "vllm"})}
    settings = settings_of(files_of(tmp_path, models, directories={"cache": "/data/cache"}, group=None)[DROP_IN])
    volumes = [value for name, value in settings if name == "Volume"]
    assert "/srv/draft:/srv/draft:ro" in volumes and "/data/cache:/data/cache" in volumes


def test_a_container_gets_the_gpus_and_cpus_of_its_model(tmp_path: Path) -> None:
    models = {"m": contained(gpus=[0], engine={"cpus": "0-2,5"})}
    settings = settings_of(files_of(tmp_path, models)[DROP_IN])
    assert ("AddDevice", "nvidia.com/gpu=GPU-x") in settings
    assert ("PodmanArgs", "--cpuset-cpus=0,1,2,5") in settings
    assert not any(name in ("CPUAffinity", "DeviceAllow") for name, _ in settings)


def test_nothing_of_an_environment_is_expanded_on_the_way(tmp_path: Path) -> None:
    environment = {"A": "100% $HOME ${HOME}", "B": "x\nUser=0"}
    settings = settings_of(files_of(tmp_path, {"m": contained(engine={"environment": environment})})[DROP_IN])
    assert ("Environment", '"A=100%% $$HOME $${HOME}"') in settings
    assert [value for name, value in settings if name == "User"] == ["990"]


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("0.0.0.0", 8001, "http://127.0.0.1:8001/health"),
        ("::", 8001, "http://[::1]:8001/health"),
        ("::1", 8001, "http://[::1]:8001/health"),
        ("gpu7", 9, "http://gpu7:9/health"),
    ],
)
def test_its_health_is_asked_for_where_it_listens(tmp_path: Path, host: str, port: int, url: str) -> None:
    settings = settings_of(files_of(tmp_path, {"m": contained(engine={"host": host}, port=port)})[DROP_IN])
    assert dict(settings)["HealthCmd"] == f"python3 -m appliance.engine.alive {url}"


def test_a_podman_that_reads_no_drop_ins_gets_the_whole_file(tmp_path: Path) -> None:
    host = dataclasses.replace(HOST, version=(4, 9), template=SHIPPED.read_text())
    files = files_of(tmp_path, {"m": contained(wait="90s")}, host=host)
    assert [path for path in files if path.is_relative_to(QUADLETS)] == [QUADLETS / "engine@m.container"]
    settings = settings_of(files[QUADLETS / "engine@m.container"])
    assert ("Notify", "true") in settings and ("Image", IMAGE) in settings
    # The last one counts.
    assert dict(settings)["TimeoutStartSec"] == "690s"


def test_the_template_shares_no_namespace_but_the_network_and_grants_nothing() -> None:
    settings = dict(settings_of(SHIPPED.read_text()))
    assert settings["ReadOnly"] == "true" and settings["DropCapability"] == "all"
    assert settings["NoNewPrivileges"] == "true" and settings["Notify"] == "true"
    assert not any(word in SHIPPED.read_text() for word in ("--pid", "--ipc", "--privileged", "AddCapability"))


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.vllm"])
def test_an_image_is_built_on_any_base_and_runs_the_engine_as_nobody(name: str) -> None:
    lines = (SHIPPED.parent / name).read_text().splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    assert words[0][0] == "ARG" and words[0][1].startswith("BASE=") and words[1] == ["FROM", "${BASE}"]
    assert [line for line in words if line[0] == "USER"][-1] == ["USER", "65532:65532"]
    assert 'ENTRYPOINT ["python3", "-m", "appliance.engine"]' in lines
    # The build's context is the checkout, of which this is all that a build sees.
    ignored = (SHIPPED.parent / f"{name}.containerignore").read_text().splitlines()
    assert ignored[0] == "**" and "!appliance" in ignored and "!.git" not in ignored


def test_a_container_is_restarted_as_a_process_would_be() -> None:
    native, container = (dict(settings_of(path.read_text())) for path in (UNITS / "engine@.service", SHIPPED))
    same = ("Wants", "After", "PartOf", "StartLimitIntervalSec", "Restart", "RestartSec", "RestartPreventExitStatus")
    for name in (*same, "TimeoutStopSec", "LimitNOFILE", "LimitMEMLOCK"):
        assert container[name] == native[name], name


def applied(folder: Path, files: Files, *others: Files) -> Plan:
    root = folder / "root"
    for state in (files, *others):
        plan = make_plan(state, root)
        write_files(plan.changes, root)
    return plan


@pytest.mark.parametrize("version", [(5, 4), (4, 9)])
def test_a_change_of_the_runtime_restarts_the_engine_and_nothing_else(tmp_path: Path, version: tuple[int, int]) -> None:
    host = dataclasses.replace(HOST, version=version, template=SHIPPED.read_text())
    native, container = (files_of(tmp_path, {"m": settings}, host=host) for settings in (model(), contained()))
    for before, after in ((native, container), (container, native)):
        plan = applied(tmp_path, before, after)
        assert [(action.verb, action.unit) for action in plan.actions] == [(Verb.RESTART, "engine@m.service")]
        assert "engine.runtime: " in plan.actions[0].reason
        assert "Volume" not in plan.actions[0].reason and "Environment" not in plan.actions[0].reason
    assert not applied(tmp_path, container, container)


def test_another_image_restarts_the_engine(tmp_path: Path) -> None:
    newer = files_of(tmp_path, {"m": contained(engine={"image": "localhost/engine:2"})})
    [action] = applied(tmp_path, files_of(tmp_path, {"m": contained()}), newer).actions
    assert (action.unit, action.verb) == ("engine@m.service", Verb.RESTART) and "localhost/engine:2" in action.reason


def test_a_model_that_is_gone_takes_its_quadlet_files_along_and_nobody_elses(tmp_path: Path) -> None:
    folder = tmp_path / "root" / QUADLETS
    folder.mkdir(parents=True)
    (folder / "engine@other.container").write_text("[Container]\nImage=x\n")
    (folder / "engine@linked.container").symlink_to("/srv/theirs.container")
    plan = applied(tmp_path, files_of(tmp_path, {"m": contained()}), files_of(tmp_path, {}))
    assert ("stop", "engine@m.service") in [(action.verb, action.unit) for action in plan.actions]
    assert sorted(path.name for path in folder.iterdir()) == ["engine@linked.container", "engine@other.container"]


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for Podman: a program that says what is written into it."""
    program = tmp_path / "bin/podman"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent))
    return program


def says(program: Path, version: str) -> None:
    program.write_text(f"#!/bin/sh\necho 'podman version {version}'\n")
    program.chmod(0o755)


def test_a_host_that_cannot_run_containers_is_told_before_anything_changes(tmp_path: Path, podman: Path) -> None:
    manifest = manifest_of(tmp_path, {"m": contained()})
    with pytest.raises(HostError, match="no Podman here"):
        container_host(manifest)
    says(podman, "4.3.1")
    with pytest.raises(HostError, match=r"model 'm' wants a container, and Podman 4\.3 has no Quadlet") as caught:
        container_host(manifest)
    assert "5.0" in (caught.value.hint or "")
    assert container_host(manifest_of(tmp_path, {"m": model()})) is None


def test_whom_a_container_runs_as_is_looked_up_on_the_host(
    tmp_path: Path, podman: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(podman, "5.4.2")
    manifest = manifest_of(tmp_path, {"m": contained()}, group="daemon")

    def nobody(name: str) -> pwd.struct_passwd:
        raise KeyError(f"getpwnam(): name not found: {name!r}")

    monkeypatch.setattr(pwd, "getpwnam", nobody)
    with pytest.raises(HostError, match="name not found") as caught:
        container_host(manifest)
    assert "systemd-sysusers" in (caught.value.hint or "")
    monkeypatch.setattr(pwd, "getpwnam", lambda name: pwd.getpwuid(os.getuid()))
    found = container_host(manifest)
    assert found is not None and (found.version, found.uid, found.group) == ((5, 4), os.getuid(), 1)
