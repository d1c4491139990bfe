"""What a keeper is told, computed in the child from manifest, keys and checkpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance import gpus, inventory
from appliance.errors import ConfigError
from appliance.fingerprint import ROOT_DIGEST
from appliance.gpus import GpuState, gpu_states
from appliance.inventory import Gpu
from appliance.keeper import settings
from appliance.target import gpu_warnings, keeper_settings
from tests.engine.checkpoints import make_checkpoint
from tests.sites import MODEL, Site
from tests.test_gpus import FakeNvml


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target") / "checkpoint")


@pytest.fixture
def site(tmp_path: Path, checkpoint: Path) -> Site:
    return Site(tmp_path, checkpoint)


def child(site: Site, *options: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "appliance.target", "--manifest", str(site.manifest), "--model", MODEL, *options]
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)


def answer(site: Site, *options: str) -> dict[str, Any]:
    done = child(site, *options)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(body, dict)
    settings.decode(done.stdout.splitlines()[-1].encode())
    return body


def test_the_target_holds_root_digest_settings_versions_and_devices(site: Site) -> None:
    told = answer(site)
    assert told["refusal"] is None
    assert told["signer"] == "signer"
    assert told["target"][ROOT_DIGEST] == site.target().identity.root_digest
    assert told["target"]["setting.dtype"] == "auto"
    assert told["target"]["torch.version"].startswith("2.")
    assert told["target"]["gpus"] == "cpu"
    assert told["slots"] == [{"role": "target", "rank": 0, "device": "cpu"}]


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"port": 18001}},
        {"engine": {"port": 18000, "environment": {"A": "b"}, "threads": 3}},
        {"wait": 5},
        {"mode": "copy"},
        {"verify": "full"},
        {"on_miss": "load"},
        {"health": {"port": 18002}},
    ],
)
def test_what_does_not_shape_weights_is_no_part_of_the_target(site: Site, change: dict[str, Any]) -> None:
    before = answer(site)["target"]
    site.write(**change)
    assert answer(site)["target"] == before


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"revision": "v2"}])
def test_what_shapes_weights_changes_the_target(site: Site, change: dict[str, Any]) -> None:
    before = answer(site)["target"]
    site.write(**change)
    assert answer(site)["target"] != before


def test_a_checkpoint_without_a_signature_is_refused_and_the_keeper_is_still_told_everything_else(site: Site) -> None:
    (site.checkpoint / "model.sig").unlink()
    told = answer(site)
    assert told["target"] is None
    assert told["refusal"]["exit_status"] == 77
    assert "model.sig" in told["refusal"]["detail"]
    assert told["runtime"].endswith(MODEL)


def test_only_verify_reads_the_files(site: Site) -> None:
    file = site.zero("model.norm.weight")
    assert answer(site)["refusal"] is None
    told = answer(site, "--verify")
    assert told["refusal"]["exit_status"] == 77
    assert f"changed: {file.name}" in told["refusal"]["detail"]


def test_verify_names_missing_and_extra_files(site: Site) -> None:
    (site.checkpoint / "generation_config.json").unlink()
    (site.checkpoint / "more.safetensors").write_bytes(b"")
    detail = answer(site, "--verify")["refusal"]["detail"]
    assert "missing: generation_config.json" in detail
    assert "extra: more.safetensors" in detail


def test_an_unsigned_checkpoint_is_pinned_at_first_sight_and_a_change_of_it_is_seen(site: Site) -> None:
    (site.checkpoint / "model.sig").unlink()
    site.policy = "local"
    site.write()
    first = answer(site)
    assert first["signer"] == "unsigned"
    assert first["target"][ROOT_DIGEST]
    site.zero("model.norm.weight")
    assert answer(site)["target"] == first["target"]
    assert answer(site, "--verify")["refusal"]["exit_status"] == 77


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("models: [", "appliance.yaml:"),
        (yaml.safe_dump({"models": {}, "group": None}), f"no model '{MODEL}'"),
        (
            yaml.safe_dump(
                {"models": {MODEL: {"checkpoint": "/x", "engine": {"port": 1}}}, "group": "nobody-of-that-name"}
            ),
            "group",
        ),
    ],
)
def test_a_manifest_that_cannot_be_used_ends_the_child_with_78(site: Site, damage: str, says: str) -> None:
    site.manifest.write_text(damage)
    done = child(site)
    assert done.returncode == 78
    assert says in done.stderr
    assert done.stdout == ""


def test_progress_comes_before_the_answer(site: Site) -> None:
    lines = child(site, "--verify").stdout.splitlines()
    assert lines[:-1]
    assert all(line.startswith("progress verifying ") for line in lines[:-1])


def test_persistence_mode_that_is_off_is_warned_of_where_the_gpu_is_used() -> None:
    # The second of the fake's two GPUs.
    states = gpu_states(FakeNvml())
    assert list(gpu_warnings(["GPU-100"], states=lambda: states)) == []
    [warning] = gpu_warnings(["GPU-100", "GPU-101"], states=lambda: states)
    assert "persistence mode of GPU 1 is off" in warning
    assert "nvidia-smi -pm 1" in warning


def test_a_keeper_that_starts_warns_of_persistence_mode(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "_load_nvml", FakeNvml)
    monkeypatch.setattr(inventory, "gpus", lambda folder=None: [Gpu(0, "GPU-100", "H200"), Gpu(1, "GPU-101", "H200")])
    site.write(gpus=[1])
    told = keeper_settings(site.manifest, MODEL, verify=False, on_progress=lambda text: None)
    assert told["slots"] == [{"role": "target", "rank": 0, "device": "GPU-101"}]
    assert "persistence mode of GPU 1 is off" in capsys.readouterr().err


def test_a_gpu_that_is_divided_can_only_be_named_in_parts() -> None:
    states = gpu_states(FakeNvml(nvmlDeviceGetMigMode=[1, 1]))
    with pytest.raises(ConfigError, match=r"GPU 0 \(GPU-100\) is divided") as caught:
        list(gpu_warnings(["GPU-100"], states=lambda: states))
    assert "MIG-1000 (NVIDIA H200 MIG 1g.18gb)" in str(caught.value.hint)
    assert list(gpu_warnings(["MIG-1003"], states=lambda: states[:1])) == []


def test_without_nvml_there_is_one_warning_and_on_a_cpu_none() -> None:
    def states() -> tuple[GpuState, ...]:
        raise ConfigError("no nvidia-ml-py")

    assert list(gpu_warnings(["GPU-100"], states=states)) == ["cannot look at the GPUs: no nvidia-ml-py"]
    assert list(gpu_warnings(["cpu", "cpu"], states=states)) == []
