"""The command line, called as an operator calls it: what it prints, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.cli.main import run
from tests.engine.checkpoints import make_checkpoint
from tests.keeper.serving import Serving, give
from tests.sites import MODEL, Site


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint")


@pytest.fixture
def site(tmp_path: Path, checkpoint: Path) -> Site:
    return Site(tmp_path / "site", checkpoint)


def call(*arguments: str | Path, status: int = 0) -> str:
    """Return what a command printed; it must end with this status."""
    argv = [sys.executable, "-m", "appliance", *map(str, arguments)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if status == 0 else done.stderr


def test_keygen_sign_verify_and_digest_agree_on_the_root_digest(tmp_path: Path, checkpoint: Path, site: Site) -> None:
    call("keygen", tmp_path / "a.key")
    signed = call("sign", site.checkpoint, "--key", tmp_path / "a.key")
    verified = call("verify", site.checkpoint, "--key", tmp_path / "a.pub")
    root_digest = call("digest", site.checkpoint).split()[0]
    assert root_digest in signed
    assert root_digest in verified
    assert "signed by a;" in verified


def test_keygen_never_overwrites_a_key(tmp_path: Path) -> None:
    call("keygen", tmp_path / "a.key")
    before = (tmp_path / "a.key").read_bytes()
    assert "not overwritten" in call("keygen", tmp_path / "a.key", status=78)
    assert (tmp_path / "a.key").read_bytes() == before


def test_verify_names_changed_missing_and_extra_files_apart(site: Site) -> None:
    (site.checkpoint / "config.json").write_text("{}")
    (site.checkpoint / "generation_config.json").unlink()
    (site.checkpoint / "more").touch()
    said = call("verify", site.checkpoint, "--key", site.folder / "trust", status=77)
    for found in ("changed: config.json", "missing: generation_config.json", "extra: more"):
        assert found in said


def test_another_key_is_not_trusted(site: Site, tmp_path: Path) -> None:
    call("keygen", tmp_path / "other.key")
    call("verify", site.checkpoint, "--key", tmp_path / "other.pub", status=77)


def test_check_reports_every_error_with_its_place(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("models:\n  chat:\n    chekpoint: /x\n    engine: {port: 99999}\n")
    said = call("check", broken, status=78)
    assert said.startswith(f"{broken}:2:3: models.chat.checkpoint")
    assert f"\n{broken}:3:5: models.chat.chekpoint" in said
    assert f"\n{broken}:4:20: models.chat.engine.port" in said


def test_check_accepts_a_manifest_that_is_right(site: Site) -> None:
    assert f"models: {MODEL}" in call("check", site.manifest)


def test_check_takes_the_manifest_as_every_other_command_does(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other.yaml")
    assert run(["check", "--manifest", str(site.manifest)]) == 0
    monkeypatch.setenv("APPLIANCE_MANIFEST", str(site.manifest))
    assert run(["check"]) == 0
    assert capsys.readouterr().out.count(f"{site.manifest}: ok; models: {MODEL}\n") == 2
    for told in (["-m", other], [other]):
        assert run(["check", *told]) == 78
        assert other in capsys.readouterr().err


def test_schema_is_a_json_schema_of_the_manifest() -> None:
    schema = json.loads(call("schema"))
    assert "models" in schema["properties"]


def test_pin_replaces_what_was_pinned(site: Site) -> None:
    (site.checkpoint / "model.sig").unlink()
    assert "signed, not pinned" in call("pin", MODEL, "--manifest", site.manifest, status=78)
    site.policy = "local"
    site.write()
    first = call("pin", MODEL, "--manifest", site.manifest)
    site.zero("model.norm.weight")
    second = call("pin", MODEL, "--manifest", site.manifest)
    assert "unsigned" in first
    assert first != second
    assert call("digest", site.checkpoint).split()[0] in second


def test_status_tells_of_a_keeper_that_is_down(site: Site) -> None:
    found = json.loads(call("status", "--json", "--manifest", site.manifest))["models"][MODEL]
    assert found["state"] == "down"
    assert "no keeper answers" in found["trouble"]
    assert "down" in call("status", "--manifest", site.manifest)


def test_status_and_evict_of_a_keeper_that_runs(site: Site) -> None:
    with site.keeper():
        found = json.loads(call("status", "--json", "--manifest", site.manifest))["models"][MODEL]
        assert found["state"] == "resident"
        assert found["signer"] == "signer"
        assert found["shards"][0]["phases_s"].keys() >= {"verify", "build", "load", "pack"}
        shown = call("status", "--manifest", site.manifest)
        assert found["root_digest"][:12] in shown
        assert "signer" in shown
        assert call("evict", MODEL, "--manifest", site.manifest).startswith(f"{MODEL}: freed ")
        found = json.loads(call("status", "--json", "--manifest", site.manifest))["models"][MODEL]
        assert found["size_bytes"] == 0


def test_a_scrub_of_weights_that_are_intact_damaged_and_gone(site: Site) -> None:
    with site.keeper():
        assert "target rank 0 on cpu: intact (" in call("scrub", MODEL, "--manifest", site.manifest)
        found = json.loads(call("scrub", MODEL, "--json", "--manifest", site.manifest))
        assert (found["damaged"], [shard["damaged"] for shard in found["shards"]]) == (False, [[]])
        with site.client() as client:
            client.evict(force=False)
        assert "no weights are resident" in call("scrub", MODEL, "--manifest", site.manifest, status=69)
    assert "no keeper answers" in call("scrub", MODEL, "--manifest", site.manifest, status=75)


def test_a_scrub_names_the_slab_whose_bytes_changed(site: Site) -> None:
    runtime = site.folder / "runtime" / MODEL
    runtime.mkdir(parents=True)
    with Serving(runtime) as serving:
        give(serving, checksums=("0" * 16, "1" * 16))
        said = call("scrub", MODEL, "--manifest", site.manifest, status=77)
        assert "target rank 0: slab 0, 1" in said
        assert f"appliance evict {MODEL}" in said


def test_unknown_commands_models_and_options_are_usage_errors(site: Site) -> None:
    assert "No such command" in call("foo", status=2)
    assert "No such option" in call("status", "--foo", status=2)
    assert "no model 'foo'" in call("evict", "foo", "--manifest", site.manifest, status=78)


def test_the_version_is_printed() -> None:
    assert call("--version").startswith("appliance ")
