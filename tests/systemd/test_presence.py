import grp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance import inventory
from appliance.cli.main import run
from appliance.host.presence import require_present
from appliance.inventory import Gpu
from appliance.manifest.load import read_manifest
from appliance.manifest.problem import ManifestError
from tests.systemd.manifests import model

UUIDS = [f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in range(3)]
HERE = [Gpu(index, uuid, "H200") for index, uuid in enumerate(UUIDS[:2])]
TWO: dict[str, Any] = {"parallel": {"tensor": 2}, "engine": {"kind": "vllm"}}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setattr(inventory, "gpus", lambda folder: HERE)

    def manifest(*models: dict[str, Any], **settings: Any) -> Path:
        named = {f"m{number}": settings for number, settings in enumerate(models)}
        (tmp_path / "appliance.yaml").write_text(yaml.safe_dump({"models": named, **settings}, sort_keys=False))
        return tmp_path / "appliance.yaml"

    return manifest


def missing(path: Path) -> list[str]:
    """Return the settings that are refused."""
    with pytest.raises(ManifestError) as caught:
        require_present(read_manifest(path))
    assert all(problem.place.line > 1 for problem in caught.value.problems)
    return [str(problem).removeprefix(f"{problem.place}: ").splitlines()[0] for problem in caught.value.problems]


def test_what_is_there_is_accepted(write: Write) -> None:
    group = grp.getgrgid(0).gr_name
    require_present(read_manifest(write(model(gpus=[1]), model(8002, gpus=[UUIDS[0]]), model(8003), group=group)))
    for named in (None, "appliance"):
        require_present(read_manifest(write(model(), group=named)))


def test_each_group_and_gpu_that_is_not_there_is_told_with_its_place(write: Write) -> None:
    path = write(model(gpus=[0, 7], **TWO), model(8002, gpus=[UUIDS[2]]), group="aplliance")
    assert missing(path) == [
        "models.m0.gpus[1]: GPU 7 is not on this host",
        f"models.m1.gpus[0]: GPU {UUIDS[2]} is not on this host",
        "group: there is no group 'aplliance' on this host",
    ]


def test_one_gpu_under_two_names_is_told(write: Write) -> None:
    path = write(model(gpus=[0, UUIDS[0]], **TWO))
    assert missing(path) == [f"models.m0.gpus: GPU {UUIDS[0]} is named twice: it is 0 and {UUIDS[0]}"]


@pytest.mark.parametrize("command", ["plan", "apply"])
def test_nothing_is_planned_or_changed_without_them(
    write: Write, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # It would go on the host that runs this test.
    monkeypatch.setattr("appliance.cli.host.carry_out", lambda *words, **more: pytest.fail("something was changed"))
    assert run([command, "--manifest", str(write(model(gpus=[7])))]) == 78
    said = capsys.readouterr()
    assert said.out == "" and "models.m0.gpus[0]: GPU 7 is not on this host" in said.err


def test_files_for_another_host_need_neither(write: Write, tmp_path: Path) -> None:
    path = write(model(gpus=[7]), group="elsewhere")
    assert run(["generate", str(tmp_path / "image"), "--manifest", str(path)]) == 0
    assert run(["plan", "--root", str(tmp_path / "image"), "--manifest", str(path)]) == 0
