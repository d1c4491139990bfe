"""The keeper's process: one for each model, small, light, and gone or killed without losing what it held."""

import json
import os
import resource
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance import memfd
from appliance.client import KeeperClient
from appliance.descriptors import close_all
from appliance.errors import EXIT_CONFIG, EXIT_HOST, EXIT_RESOURCE, EXIT_TRUST
from appliance.fingerprint import Fingerprint
from appliance.keeper.settings import Refusal
from appliance.ports import free_port
from appliance.run import run
from tests.keeper.probe import got
from tests.keeper.process import KeeperProcess
from tests.keeper.serving import attach, donate, offer
from tests.keeper.shards import PAGE, TARGET, donation_of, fingerprint_of, shard_of
from tests.keeper.stage import Stage, stored
from tests.service_manager import ServiceManager

NOBODY = 65534
MEMORY_LIMIT_BYTES = 50 << 20
# What must never be loaded: it is large, or it parses what people write.
KEPT_OUT = (
    "torch",
    "numpy",
    "transformers",
    "safetensors",
    "pydantic",
    "pydantic_core",
    "yaml",
    "cryptography",
    "cuda",
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's part can only be played by root")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, ranks=1)


def started(stage: Stage, manager: ServiceManager, **changes: object) -> KeeperProcess:
    return KeeperProcess(
        Path("appliance.yaml"),
        child=stage.program,
        environ=manager.environ,
        **changes,  # type: ignore[arg-type]
    )


def resident(stage: Stage, manager: ServiceManager, *, slabs: int = 2) -> KeeperProcess:
    """Return a keeper that was given back one shard."""
    given = stored(manager, shard_of(TARGET, slabs=slabs), settings=stage.settings())
    return started(stage, manager, given=given)


def test_a_keeper_serves_and_ends_with_sigterm(stage: Stage, manager: ServiceManager) -> None:
    with started(stage, manager) as keeper:
        manager.wait_for_line("READY=1")
        with keeper.connect(stage.socket_path) as engine:
            assert attach(engine, fingerprint_of(TARGET)) == 2
            assert engine.status()["pid"] == keeper.pid
        assert keeper.terminate() == 0
    manager.wait_for_line("STOPPING=1")
    assert len(manager.names()) == 5


def test_a_second_keeper_for_one_model_ends_and_names_the_first(stage: Stage, manager: ServiceManager) -> None:
    with resident(stage, manager) as first:
        manager.wait_for_line("READY=1")
        with KeeperProcess(Path("appliance.yaml"), child=stage.program) as second:
            status, said = second.ended()
        assert status == EXIT_RESOURCE
        assert said == f"appliance: another keeper (pid {first.pid}) serves {stage.runtime} model=m\n"
        with first.connect(stage.socket_path) as engine:
            assert attach(engine, fingerprint_of(TARGET)) == 2


def test_a_killed_keepers_weights_are_all_there_in_the_next(stage: Stage, manager: ServiceManager) -> None:
    bodies = [bytes([1 + index]) * PAGE for index in range(20)]
    with started(stage, manager) as keeper:
        manager.wait_for_line("READY=1")
        with keeper.connect(stage.socket_path) as donor:
            offer(donor, replace=True)
            with closing(donation_of(slabs=20, bodies=bodies)) as donation:
                donate(donor, donation)
        keeper.kill()
    assert stage.socket_path.exists()  # stale
    with started(stage, manager, given=manager.handed_over()) as keeper:
        with keeper.connect(stage.socket_path) as engine:
            described = engine.describe(role="target", rank=0, wait_s=20)
            described.configs.close()
            assert described.record == donation.record
            slabs = engine.attach(role="target", rank=0, client="e", fingerprint=described.record.fingerprint)
            assert [memfd.read(slab, what="slab", limit_bytes=PAGE) for slab in slabs] == bodies
            close_all(slabs)
        assert stage.loads == 1


def test_an_engine_renews_its_lease_with_the_next_keeper(stage: Stage, manager: ServiceManager) -> None:
    with resident(stage, manager) as keeper, keeper.connect(stage.socket_path) as engine:
        attach(engine, fingerprint_of(TARGET))
        shard_id = engine.status()["shards"][0]["shard_id"]
        keeper.kill()
        engine.wait_for_hangup()
    with started(stage, manager, given=manager.handed_over()) as keeper, keeper.connect(stage.socket_path) as engine:
        engine.renew(shard_id=shard_id, client="engine")
        assert [lease["pid"] for lease in engine.status()["leases"]] == [os.getpid()]


def test_only_owner_and_group_reach_the_socket(stage: Stage, manager: ServiceManager) -> None:
    with resident(stage, manager):
        manager.wait_for_line("READY=1")
        assert stat.S_IMODE(stage.socket_path.stat().st_mode) == 0o660
        assert stat.S_IMODE(stage.runtime.stat().st_mode) == 0o750


def test_health_turns_from_503_with_a_reason_to_200(stage: Stage, manager: ServiceManager) -> None:
    port = free_port()
    stage.will_obtain(health_port=port)
    stage.will_load(1, 1, 1, 1, 1, 1, 1, 1)
    with started(stage, manager) as keeper:
        keeper.wait_for_line("trying again")
        code, kind, body = got(f"http://127.0.0.1:{port}/health")
        assert (code, kind.split(";")[0]) == (503, "application/json")
        assert "the loader failed with status 1" in json.loads(body)["trouble"]
        with keeper.connect(stage.socket_path) as donor:
            offer(donor)
            with closing(donation_of()) as donation:
                donate(donor, donation)
            code, _, body = got(f"http://127.0.0.1:{port}/health")
            assert (code, json.loads(body)["state"], json.loads(body)["trouble"]) == (200, "resident", "")
        metrics = {
            family.name: family for family in text_string_to_metric_families(got(f"http://127.0.0.1:{port}/metrics")[2])
        }
        assert metrics["appliance_weights_bytes"].samples[0].value == 2 * PAGE
        (verdict,) = metrics["appliance_attach"].samples
        assert (verdict.labels["verdict"], verdict.value) == ("donated", 1)


def modules_of(code: str) -> set[str]:
    names = run([sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], timeout_s=60).stdout.split()
    return {name.partition(".")[0] for name in names}


def test_the_keeper_imports_nothing_heavy() -> None:
    assert not modules_of("import appliance.keeper.__main__") & set(KEPT_OUT)


def test_a_running_keeper_has_nothing_heavy_in_memory(stage: Stage, manager: ServiceManager) -> None:
    port = free_port()
    stage.will_obtain(health_port=port)
    with started(stage, manager) as keeper:
        manager.wait_for_line("READY=1")
        with keeper.connect(stage.socket_path) as engine:
            attach(engine, fingerprint_of(TARGET))
            got(f"http://127.0.0.1:{port}/metrics")
        mapped = Path(f"/proc/{keeper.pid}/maps").read_text()
        assert "libpython" in mapped or "python3" in mapped
        assert not [
            name for name in KEPT_OUT if f"/{name}/" in mapped or f"/{name}." in mapped or f"/_{name}" in mapped
        ]
        assert "libcuda" not in mapped


@pytest.mark.parametrize("slabs", [1, 16, 200])
def test_a_keeper_is_small_whatever_it_holds(stage: Stage, manager: ServiceManager, slabs: int) -> None:
    port = free_port()
    given = stored(manager, shard_of(TARGET, slabs=slabs), settings=stage.settings())
    stage.will_obtain(health_port=port)
    with started(stage, manager, given=given) as keeper:
        manager.wait_for_line("READY=1")
        for _ in range(20):
            with keeper.connect(stage.socket_path) as engine:
                engine.describe(role="target", rank=0, wait_s=0).configs.close()
                assert attach(engine, fingerprint_of(TARGET)) == slabs
            got(f"http://127.0.0.1:{port}/metrics")
        assert keeper.memory_bytes < MEMORY_LIMIT_BYTES
        print(
            f"{slabs} slabs: {keeper.memory_bytes / 2**20:.1f} MiB resident, {keeper.count_descriptors()} descriptors"
        )


def test_a_large_slab_is_not_mapped_and_nobody_has_it_after_an_eviction(stage: Stage, manager: ServiceManager) -> None:
    size_bytes = 64 << 20
    with started(stage, manager) as keeper:
        manager.wait_for_line("READY=1")
        with keeper.connect(stage.socket_path) as donor:
            offer(donor, replace=True)
            with closing(donation_of(slabs=1, bodies=[b"\1" * size_bytes], slab_sizes=(size_bytes,))) as donation:
                donate(donor, donation)
            assert donor.status()["size_bytes"] == size_bytes
            assert keeper.memory_bytes < MEMORY_LIMIT_BYTES
            assert sorted(keeper.memory_files()) == ["configs", "record", "slab 0"]
            assert donor.evict(force=True) == size_bytes
            assert keeper.memory_files() == []
            assert manager.names() == ["w1.settings"]


def test_descriptors_come_and_go_in_equal_numbers(stage: Stage, manager: ServiceManager) -> None:
    with resident(stage, manager) as keeper:
        manager.wait_for_line("READY=1")
        counts = []
        for _ in range(3):
            for _ in range(100):
                with keeper.connect(stage.socket_path) as engine:
                    engine.describe(role="target", rank=0, wait_s=0).configs.close()
                    attach(engine, fingerprint_of(TARGET))
            with keeper.connect(stage.socket_path) as engine:
                while engine.status()["leases"]:
                    pass
                counts.append(keeper.count_descriptors())
        assert counts[0] == counts[1] == counts[2]


def test_out_of_descriptors_a_keeper_goes_on_and_loses_nothing(stage: Stage, manager: ServiceManager) -> None:
    given = stored(manager, shard_of(TARGET), settings=stage.settings())
    with started(stage, manager, given=given, limits={resource.RLIMIT_NOFILE: 40}) as keeper:
        manager.wait_for_line("READY=1")
        with keeper.connect(stage.socket_path) as engine, ExitStack() as stack:
            attach(engine, fingerprint_of(TARGET))
            for _ in range(60):
                crowd = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                crowd.connect(str(stage.socket_path))
            keeper.wait_for_line("cannot accept clients: Too many open files")
            assert engine.status()["state"] == "resident"
            assert len(engine.status()["leases"]) == 1
        with keeper.connect(stage.socket_path) as engine:
            assert attach(engine, fingerprint_of(TARGET)) == 2
    assert len(manager.names()) == 5


def test_a_keeper_allows_itself_as_many_descriptors_as_it_may(stage: Stage, manager: ServiceManager) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        keeper = started(stage, manager)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with keeper:
        manager.wait_for_line("READY=1")
        assert resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE) == (hard, hard)


@as_root
def test_a_runtime_directory_that_cannot_be_written_ends_a_keeper_with_one_line(open_folder: Path) -> None:
    stage = Stage(open_folder, ranks=1)
    stage.runtime.parent.mkdir()
    for path in open_folder.iterdir():
        path.chmod(0o755)
    (open_folder / "asked").touch()
    (open_folder / "asked").chmod(0o666)
    child = open_folder / "obtained"
    child.write_text(f"#!/bin/sh\ncat {open_folder}/obtain\n")
    child.chmod(0o755)
    with KeeperProcess(Path("appliance.yaml"), child=child, user=NOBODY) as keeper:
        status, said = keeper.ended()
    assert status == EXIT_HOST
    assert said.startswith(f"appliance: cannot use {stage.runtime}/keeper.lock: Permission denied")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("refusal", "status", "line"),
    [
        (Refusal("model.sig: not signed by a trusted key", EXIT_TRUST), EXIT_TRUST, "not signed by a trusted key"),
        (None, EXIT_CONFIG, "model 'm' cannot be planned"),
    ],
)
def test_a_start_that_cannot_be_ends_with_the_status_of_who_must_act(
    stage: Stage, manager: ServiceManager, refusal: Refusal | None, status: int, line: str
) -> None:
    if refusal is None:
        stage.will_obtain(status=status)
    else:
        stage.will_obtain(refusal=refusal)
    with started(stage, manager) as keeper:
        ended, said = keeper.ended()
    assert ended == status
    assert line in said
    assert said.count("\n") == 1
    assert not manager.heard("READY=1")


def test_what_the_keeper_starts_cannot_speak_for_it_and_gets_nothing_of_its(
    stage: Stage, manager: ServiceManager, tmp_path: Path
) -> None:
    code = f"""
import os
from pathlib import Path
fds = [f"/proc/self/fd/{{name}}" for name in os.listdir("/proc/self/fd") if int(name) > 2]
fds = [os.readlink(fd) for fd in fds if os.path.exists(fd)]
names = [name for name in os.environ if name in ("NOTIFY_SOCKET", "FDSTORE") or name[:6] in ("LISTEN", "WATCHD")]
Path({str(tmp_path / "found")!r}).write_text(repr((names, fds)))
raise SystemExit(1)
"""
    stage.will_obtain(loader=[sys.executable, "-IS", "-c", code], ranks=2)
    given = stored(manager, shard_of(TARGET), settings=stage.settings())
    environ = manager.environ | {"WATCHDOG_USEC": "60000000", "FDSTORE": "1000"}
    with KeeperProcess(Path("appliance.yaml"), child=stage.program, given=given, environ=environ) as keeper:
        keeper.wait_for_line("trying again")
    assert (tmp_path / "found").read_text() == "([], [])"


def test_a_log_that_nobody_reads_any_more_costs_nothing(stage: Stage, manager: ServiceManager) -> None:
    with resident(stage, manager) as keeper:
        manager.wait_for_line("READY=1")
        keeper.close_stderr()
        for _ in range(3):
            with keeper.connect(stage.socket_path) as engine:
                assert attach(engine, fingerprint_of(TARGET)) == 2
        assert keeper.terminate() == 0


# From here on with the real child: a manifest, and a checkpoint whose digests the host pins itself.


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1" * 16)
    (checkpoint / "config.json").write_text("{}")
    manifest = tmp_path / "appliance.yaml"
    manifest.write_text(
        f"trust: {{policy: local}}\ndirectories: {{runtime: {tmp_path}/run, state: {tmp_path}/state}}\ngroup: null\n"
        f"models:\n  m:\n    checkpoint: {checkpoint}\n    engine: {{port: 8001}}\n"
    )
    return manifest


def target_of(manifest: Path) -> tuple[Fingerprint, dict[str, object]]:
    """Return what the real child says."""
    command = [sys.executable, "-m", "appliance.target", "--manifest", str(manifest), "--model", "m"]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1])
    return Fingerprint.from_json(answer["target"]), answer


def test_with_a_real_manifest_weights_outlive_the_keeper_and_a_broken_manifest(
    manifest: Path, manager: ServiceManager, tmp_path: Path
) -> None:
    target, settings = target_of(manifest)
    given = stored(manager, shard_of(target), settings=settings)
    socket_path = tmp_path / "run" / "m" / "keeper.sock"

    def lives(given_back: object, *, refused: bool, trouble: str) -> None:
        readies = sum("READY=1" in lines for lines in manager.said())
        with KeeperProcess(manifest, given=given_back, environ=manager.environ) as keeper:  # type: ignore[arg-type]
            manager.wait_for(lambda manager: sum("READY=1" in lines for lines in manager.said()) > readies)
            with keeper.connect(socket_path) as engine:
                assert attach(engine, fingerprint_of(target)) == 2
                status = engine.status()
                assert status["root_digest"] == target.root_digest
                assert (status["refused"], trouble in status["trouble"]) == (refused, True)
            assert keeper.terminate() == 0

    lives(given, refused=False, trouble="")
    text = manifest.read_text()
    manifest.write_text(text.replace("port: 8001", "prot: 8001"))
    lives(manager.handed_over(), refused=True, trouble="cannot be used")
    manifest.write_text(text)
    lives(manager.handed_over(), refused=False, trouble="")


def test_a_real_broken_manifest_ends_a_keeper_that_holds_nothing(manifest: Path, tmp_path: Path) -> None:
    manifest.write_text(manifest.read_text().replace("port: 8001", "prot: 8001"))
    with KeeperProcess(manifest) as keeper:
        status, said = keeper.ended()
    assert status == EXIT_CONFIG
    assert "prot" in said


def test_nobody_is_needed_to_run_a_keeper_without_a_service_manager(stage: Stage) -> None:
    environ = {"NOTIFY_SOCKET": ""}
    with KeeperProcess(Path("appliance.yaml"), child=stage.program, environ=environ) as keeper:
        keeper.wait_for_line("resident")
        with KeeperClient.connect(stage.socket_path) as engine:
            assert attach(engine, fingerprint_of(TARGET)) == 2
        assert keeper.terminate() == 0
