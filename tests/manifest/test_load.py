"""From a path to a Manifest: files that cannot be read, relative paths, warnings, speed."""

import logging
import os
import time
from pathlib import Path

import pytest

from appliance.errors import EXIT_CONFIG, ConfigError
from appliance.manifest.load import load_manifest, read_manifest
from appliance.manifest.problem import ManifestError

SMALLEST = "models:\n  chat:\n    checkpoint: /srv/chat\n    engine: {port: 8001}\n"


def test_the_error_for_a_port_used_twice_reads_as_promised(tmp_path: Path) -> None:
    path = _written(
        tmp_path,
        """\
models:
    support-bot:
        checkpoint: /srv/a
        engine: {port: 8001}
    chat:
        checkpoint: /srv/b
        engine:
          port: 8001
""",
    )
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    assert str(caught.value) == (
        f"{path}:8:17: models.chat.engine.port: 8001 is already used by model 'support-bot'\n"
        "  hint: give one of them another port"
    )
    assert caught.value.exit_status == EXIT_CONFIG


def test_a_missing_manifest_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the manifest .*/none\.yaml: no such file"):
        load_manifest(tmp_path / "none.yaml")


def test_a_manifest_that_is_no_file_is_a_config_error(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, Path("/dev/null"), Path("/proc/self/fd")):
        with pytest.raises(ConfigError, match="not a regular file"):
            load_manifest(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "appliance.yaml/below", "link-to-itself"])
def test_a_path_that_cannot_be_opened_is_a_config_error(name: str, tmp_path: Path) -> None:
    _written(tmp_path, SMALLEST)
    (tmp_path / "link-to-itself").symlink_to("link-to-itself")
    with pytest.raises(ConfigError, match="cannot read the manifest"):
        load_manifest(tmp_path / name)


def test_a_relative_path_starts_at_the_folder_of_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SMALLEST.replace("/srv/chat", "checkpoints/chat") + "directories: {state: state}\ntrust: {keys: [one.pem]}\n"
    _written(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "appliance.yaml", Path("appliance.yaml")):
        manifest = load_manifest(path)
        assert manifest.model("chat").checkpoint == tmp_path / "checkpoints/chat"
        assert manifest.directories.state == tmp_path / "state"
        assert manifest.directories.cache == Path("/var/cache/appliance")
        assert manifest.trust.keys == (tmp_path / "one.pem",)


def test_a_relative_path_starts_at_the_folder_of_the_link_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    target = _written(tmp_path / "repository", SMALLEST.replace("/srv/chat", "chat"))
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    assert load_manifest(link).model("chat").checkpoint == tmp_path / "chat"


def test_a_warning_is_logged_with_its_place_and_kept_with_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _written(tmp_path, SMALLEST.replace("8001}", "8001, host: 0.0.0.0}"))
    with caplog.at_level(logging.WARNING):
        load_manifest(path)
    expected = f"{path}:4:32: models.chat.engine.host: 0.0.0.0 can be reached from the network"
    assert [record.name for record in caplog.records] == ["appliance.manifest.load"]
    assert caplog.messages[0].startswith(expected)
    assert [str(warning) for warning in read_manifest(path).warnings] == caplog.messages


def test_what_only_the_host_can_tell_is_an_error_at_the_settings_place(tmp_path: Path) -> None:
    file = read_manifest(_written(tmp_path, SMALLEST))
    error = file.error(("models", "chat", "checkpoint"), "no such folder", hint="copy it there")
    assert isinstance(error, ConfigError)
    assert str(error) == f"{file.path}:3:17: models.chat.checkpoint: no such folder\n  hint: copy it there"
    assert str(file.error(("models", "chat", "gpus", 0), "no such GPU")) == (
        f"{file.path}:2:3: models.chat.gpus[0]: no such GPU"
    )


def test_a_hundred_models_are_read_well_within_half_a_second(tmp_path: Path) -> None:
    models = "".join(
        f"""
  model-{number}:
    checkpoint: /srv/models/model-{number}
    revision: "v{number}"
    quantization: fp8
    gpus: [{2 * number}, {2 * number + 1}]
    parallel: {{tensor: 2}}
    wait: 5m
    engine:
      kind: vllm
      port: {10000 + number}
      args: [--max-model-len, 32768, --gpu-memory-utilization, "0.90"]
      environment: {{TOKENIZERS_PARALLELISM: "false"}}
      cpus: 0-3,8
    health: {{port: {20000 + number}}}
"""
        for number in range(100)
    )
    path = _written(tmp_path, f"models:\n{models}")
    took = []
    for _ in range(3):
        began = time.process_time()
        assert len(read_manifest(path).manifest.models) == 100
        took.append(time.process_time() - began)
    assert min(took) < 0.25, took


def _written(folder: Path, text: str) -> Path:
    path = folder / "appliance.yaml"
    path.write_text(text)
    return path
