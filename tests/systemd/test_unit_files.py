import re
import shlex
import string
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from appliance.errors import NOT_CURED_BY_RESTART
from appliance.host.plan import make_plan
from appliance.host.unit_files import APPLIED, applied_manifest, unit_files
from appliance.host.unit_text import Link, quoted
from appliance.inventory import Gpu
from appliance.manifest.load import load_manifest
from appliance.manifest.values import ModelName
from tests.systemd.manifests import SHIPPED_SERVICES, SOURCE, UNITS, files_of, manifest_of, model, settings_of

ETC = PurePosixPath("etc/systemd/system")
WEIGHTS = ETC / "weights@m.service.d/10-appliance.conf"
ENGINE = ETC / "engine@m.service.d/10-appliance.conf"
MANY = 100
MANY_LIMIT_S = 0.5
BUSY_MACHINE = 4


def test_each_model_gets_drop_ins_and_links_to_the_templates_and_nothing_else(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"m": model()})
    templates = "/usr/local/lib/systemd/system"
    assert {str(path): content for path, content in files.items() if isinstance(content, Link)} == {
        f"{ETC}/appliance.target.wants/weights@m.service": Link(f"{templates}/weights@.service"),
        f"{ETC}/appliance.target.wants/engine@m.service": Link(f"{templates}/engine@.service"),
        f"{ETC}/weights@m.service.wants/checkpoint@m.path": Link(f"{templates}/checkpoint@.path"),
        f"{ETC}/weights@m.service.wants/checkpoint@m.timer": Link(f"{templates}/checkpoint@.timer"),
    }
    texts = {path for path, content in files.items() if isinstance(content, str)}
    assert texts == {WEIGHTS, ENGINE, ETC / "checkpoint@m.path.d/10-appliance.conf", APPLIED}
    assert all(("SourcePath", str(SOURCE)) in settings_of(files[path]) for path in texts - {APPLIED})


def test_no_checkpoint_is_watched_where_none_is_signed(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"m": model()}, trust={"policy": "local"})
    assert [path for path in files if "checkpoint@" in str(path)] == []


def test_a_drafts_own_checkpoint_is_watched_too(tmp_path: Path) -> None:
    models = {"m": model(engine={"kind": "vllm"}, draft={"checkpoint": "/srv/100%", "tokens": 2})}
    settings = settings_of(files_of(tmp_path, models)[ETC / "checkpoint@m.path.d/10-appliance.conf"])
    assert [value for name, value in settings if name == "PathChanged"] == ["/srv/models/8001", "/srv/100%%"]


def test_the_copy_that_units_read_says_what_the_manifest_says(tmp_path: Path) -> None:
    models = {
        "m": model(engine={"cpus": "0-3,8", "threads": 2, "environment": {"A": "50 %h\t$X 'q' \"r\""}}, wait="90s"),
        "n.1_x-y": model(8002, gpus=[0], dtype="bfloat16", engine={"kind": "vllm", "args": ["--x", 1]}),
    }
    manifest = manifest_of(tmp_path, models, group=None, directories={"state": "/srv/state"})
    copy = tmp_path / "copy.yaml"
    copy.write_text(applied_manifest(manifest, SOURCE))
    assert load_manifest(copy) == manifest


def test_an_engine_gets_its_cpus_threads_and_environment(tmp_path: Path) -> None:
    engine = {"cpus": "0-2,5", "threads": 3, "environment": {"A": "b c", "P": "100%"}}
    settings = settings_of(files_of(tmp_path, {"m": model(engine=engine, wait="90s")})[ENGINE])
    assert ("CPUAffinity", "0 1 2 5") in settings
    assert ("Environment", '"OMP_NUM_THREADS=3"') in settings
    assert ("Environment", '"A=b c"') in settings and ("Environment", '"P=100%%"') in settings
    assert ("TimeoutStartSec", "690s") in settings, "waiting for weights is not what the limit is for"


def test_what_shapes_vllms_weights_is_the_keepers_business_and_what_does_not_is_not(tmp_path: Path) -> None:
    plain = {
        "kind": "vllm",
        "args": ["--max-num-seqs", "8", "--api-key", "k"],
        "environment": {"VLLM_LOGGING_LEVEL": "x"},
    }
    shaping = {"kind": "vllm", "args": ["--max-model-len", "512"], "environment": {"VLLM_USE_DEEP_GEMM": "1"}}
    before = settings_of(files_of(tmp_path, {"m": model(engine={"kind": "vllm"})})[WEIGHTS])
    assert settings_of(files_of(tmp_path, {"m": model(engine=plain)})[WEIGHTS]) == before
    after = settings_of(files_of(tmp_path, {"m": model(engine=shaping)})[WEIGHTS])
    assert {setting for setting in after if setting not in before} == {
        ("engine.args", "--max-model-len 512"),
        ("engine.environment.VLLM_USE_DEEP_GEMM", "1"),
    }


def test_only_the_gpus_of_a_model_are_opened_to_it(tmp_path: Path) -> None:
    gpus = {"0": Gpu(index=0, uuid="GPU-x", model="H200", minor=4)}
    models = {"m": model(gpus=[0], engine={"kind": "vllm"}), "n": model(8002)}
    files = files_of(tmp_path, models, gpus=gpus)
    for path in (WEIGHTS, ENGINE):
        devices = [value for name, value in settings_of(files[path]) if name == "DeviceAllow"]
        assert "/dev/nvidia4 rw" in devices and "/dev/nvidiactl rw" in devices
        other = PurePosixPath(str(path).replace("@m.", "@n."))
        assert [value for name, value in settings_of(files[other]) if name == "DeviceAllow"] == []


def test_the_nodes_of_a_part_are_opened_to_its_model_and_those_of_other_parts_are_not(tmp_path: Path) -> None:
    uuids = [f"MIG-{digit * 8}-0000-0000-0000-000000000000" for digit in "ab"]
    parts = {uuids[0]: Gpu(0, uuids[0], "H200 1g", 4, (30, 31)), uuids[1]: Gpu(0, uuids[1], "H200 1g", 4, (39, 40))}
    models = {name: model(8001 + number, gpus=[uuids[number]]) for number, name in enumerate("mn")}
    files = files_of(tmp_path, models, gpus=parts)
    for path in (WEIGHTS, ENGINE):
        settings = settings_of(files[path])
        devices = [value for name, value in settings if name == "DeviceAllow" and "nvidia-cap" in value]
        assert devices == ["/dev/nvidia-caps/nvidia-cap30 r", "/dev/nvidia-caps/nvidia-cap31 r"]
        assert ("DeviceAllow", "/dev/nvidia4 rw") in settings


def test_folders_and_a_group_of_its_own_are_opened_to_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"directories": {"runtime": "/srv/run 1"}, "group": "llm"}
    for path in (WEIGHTS, ENGINE):
        found = settings_of(files_of(tmp_path, {"m": model()}, **settings)[path])
        assert ("ReadWritePaths", '"-/srv/run 1"') in found and ("SupplementaryGroups", "llm") in found
        plain = dict(settings_of(files_of(tmp_path, {"m": model()})[path]))
        assert not {"ReadWritePaths", "SupplementaryGroups"} & plain.keys()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40))
def test_a_quoted_value_is_one_word_on_one_line_and_reads_back(text: str) -> None:
    line = quoted(text)
    assert not re.search(r"[\x00-\x1f\x7f]", line)
    # systemd.syntax(7): C escapes in quotes, then specifiers.
    assert re.fullmatch(r'"(?:[^"\\]|\\["\\]|\\x[0-9a-f]{2})*"', line)
    unescaped = re.sub(r"\\(x..|.)", lambda found: chr(int(found[1][1:], 16)) if found[1][1:] else found[1], line[1:-1])
    assert "%" not in unescaped.replace("%%", "") and unescaped.replace("%%", "%") == text


def test_a_value_cannot_become_a_setting(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, {"m": model(engine={"environment": {"A": "x\nUser=root\nGroup=root"}})})
    names = [name for name, _ in settings_of(unit_files(manifest, SOURCE, {})[ENGINE])]
    assert "User" not in names and "Group" not in names


def test_every_name_that_a_manifest_takes_is_a_plain_instance_name() -> None:
    def is_accepted(name: str) -> bool:
        try:
            TypeAdapter(ModelName).validate_python(name)
        except ValidationError:
            return False
        return True

    accepted = {character for character in map(chr, range(0x250)) if is_accepted(f"a{character}")}
    # systemd-escape(1): what is not of these would have to be escaped.
    assert accepted and accepted <= set(string.ascii_letters + string.digits + ":_.-")
    assert not is_accepted(".a")


@pytest.mark.parametrize("path", [UNITS / "engine@.service", UNITS / "weights@.service"], ids=str)
def test_what_a_restart_does_not_cure_is_not_restarted(path: Path) -> None:
    settings = dict(settings_of(path.read_text()))
    assert set(map(int, settings["RestartPreventExitStatus"].split())) == NOT_CURED_BY_RESTART
    assert settings["Restart"] == "always" and "RestartForceExitStatus" not in settings
    # Giving up would free what is resident.
    assert settings["StartLimitIntervalSec"] == "0"


@pytest.mark.parametrize("path", [path for path in SHIPPED_SERVICES if path.name != "engine-stop@.service"], ids=str)
def test_shipped_units_run_the_installed_release_as_their_user(path: Path) -> None:
    settings = settings_of(path.read_text())
    assert ("User", "appliance") in settings and ("Group", "appliance") in settings
    for name, value in settings:
        program = shlex.split(value)[0] if name.startswith("Exec") else "/opt/appliance/current/bin/python"
        assert program.lstrip("+-") in ("/opt/appliance/current/bin/python", "/bin/sh"), value
    assert "NoNewPrivileges" in dict(settings)


def test_an_engine_may_take_its_time_to_stop_before_its_keeper_is_killed() -> None:
    engine, *others = (
        int(dict(settings_of((UNITS / f"{kind}@.service").read_text()))["TimeoutStopSec"].removesuffix("s"))
        for kind in ("engine", "engine-stop", "weights")
    )
    assert all(engine < seconds for seconds in others)


def test_a_keeper_ends_its_engine_in_the_same_words_before_its_stop_and_during_its_start() -> None:
    before, during = (
        next(value for name, value in settings_of((UNITS / unit).read_text()) if name.startswith("ExecStop"))
        for unit in ("engine-stop@.service", "weights@.service")
    )
    assert before.lstrip("-+") == during.lstrip("-+")


def test_a_hundred_models_are_planned_in_half_a_second(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, {f"m{number}": model(8000 + number) for number in range(MANY)})
    began = time.process_time()
    plan = make_plan(unit_files(manifest, SOURCE, {}), tmp_path)
    took_s = time.process_time() - began
    print(f"{MANY} models: {len(plan.changes)} files planned in {took_s:.3f} s")
    assert len(plan.changes) == 7 * MANY + 1
    assert took_s < MANY_LIMIT_S * BUSY_MACHINE
