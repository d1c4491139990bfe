import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.main import run
from appliance.errors import EXIT_RESOURCE
from appliance.host.applied import running
from appliance.manifest.load import load_manifest
from tests.systemd.manifests import manifest_of, model, put_applied


def test_what_was_applied_from_a_manifest_is_found_again_and_from_no_other(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, {"m": model()})
    source, other, root = tmp_path / "appliance.yaml", tmp_path / "other.yaml", tmp_path / "root"
    assert running(source, root) == source
    copy = put_applied(manifest, source, root=root)
    source.write_text("broken: [")
    assert running(source, root) == copy
    assert load_manifest(copy) == manifest
    assert running(other, root) == other


def test_what_acts_on_weights_goes_by_what_was_applied_not_by_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, root = tmp_path / "appliance.yaml", tmp_path / "root"
    applied = manifest_of(
        tmp_path, {"m": model(engine={"kind": "vllm"})}, directories={"runtime": str(tmp_path / "runtime")}
    )
    copy = put_applied(applied, source, root=root)
    source.write_text("broken: [")
    compared: list[list[str]] = []

    def started(argv: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        compared.append(argv)
        return subprocess.CompletedProcess(argv, EXIT_RESOURCE, "")

    monkeypatch.setattr(subprocess, "run", started)
    for module in ("weights", "parity"):
        monkeypatch.setattr(f"appliance.cli.{module}.running", partial(running, root=root))
    for command in ("evict", "scrub"):
        assert run([command, "m", "--manifest", str(source)]) == EXIT_RESOURCE
        assert "no keeper answers" in capsys.readouterr().err
    assert run(["parity", "m", "--manifest", str(source)]) == EXIT_RESOURCE
    assert [argv[argv.index("--manifest") + 1] for argv in compared] == [str(copy)]
