"""What each file of a checkpoint is for."""

import json

import pytest

from appliance.checkpoint.contents import check_configs, is_config, tensor_files
from appliance.checkpoint.file_stream import make_hasher
from appliance.checkpoint.manifest import ALGORITHMS, Algorithm, CheckpointManifest, make_manifest
from appliance.errors import ConfigError, TrustError

CONFIGS = {"config.json": b"{}", "tokenizer/tokenizer.json": b"[]", "chat_template.jinja": b""}


def manifest_of(
    *paths: str, configs: dict[str, bytes] | None = None, algorithm: Algorithm = "sha256"
) -> CheckpointManifest:
    files = dict.fromkeys(paths, "0" * 64)
    for path, data in (configs or {}).items():
        hasher = make_hasher(algorithm)
        hasher.update(data)
        files[path] = hasher.hexdigest()
    return make_manifest("tiny", algorithm, files.items())


def test_every_file_without_tensors_is_a_config() -> None:
    for path in (
        "config.json",
        "tokenizer.model",
        "a/b.txt",
        "LICENSE",
        "model.safetensors.index.json",
        "x.py",
        "x.md",
    ):
        assert is_config(path)
    for path in (
        "model.safetensors",
        "a/b.SAFETENSORS",
        "pytorch_model.bin",
        "x.pt",
        "x.gguf",
        "x.h5",
        "tf.msgpack",
        "x.onnx",
    ):
        assert not is_config(path)
    for path in (".gitattributes", ".git/config", ".cache/huggingface/x.metadata"):
        assert not is_config(path)


class TestConfigs:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_the_very_bytes_of_the_manifest_pass(self, algorithm: Algorithm) -> None:
        manifest = manifest_of("model.safetensors", "x.bin", ".gitattributes", configs=CONFIGS, algorithm=algorithm)
        check_configs(manifest, CONFIGS)

    def test_one_changed_missing_or_added_is_named(self) -> None:
        manifest = manifest_of("model.safetensors", configs=CONFIGS)
        with pytest.raises(TrustError, match=r"config config\.json is not the one"):
            check_configs(manifest, {**CONFIGS, "config.json": b"{ }"})
        with pytest.raises(TrustError, match=r"chat_template\.jinja is missing from"):
            check_configs(manifest, {path: data for path, data in CONFIGS.items() if "chat" not in path})
        for extra in ("evil.json", "model.safetensors"):
            with pytest.raises(TrustError, match=f"{extra} does not belong to"):
                check_configs(manifest, {**CONFIGS, extra: b""})


class TestTensorFiles:
    INDEX = "model.safetensors.index.json"

    def test_the_index_says_which_and_what_each_must_have(self) -> None:
        index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "sub/two.safetensors", "c": "one.safetensors"}})
        manifest = manifest_of("one.safetensors", "sub/two.safetensors", "other.safetensors", self.INDEX)
        assert tensor_files(manifest, {self.INDEX: index.encode()}, what="it") == {
            "one.safetensors": {"a", "c"},
            "sub/two.safetensors": {"b"},
        }

    def test_without_an_index_the_single_file_or_else_all_at_the_top(self) -> None:
        manifest = manifest_of("model.safetensors", "consolidated.safetensors")
        assert tensor_files(manifest, {}, what="it") == {"model.safetensors": frozenset()}
        manifest = manifest_of("b.safetensors", "a.safetensors", "vae/c.safetensors", "x.bin")
        assert list(tensor_files(manifest, {}, what="it")) == ["a.safetensors", "b.safetensors"]

    def test_a_checkpoint_without_safetensors_is_refused(self) -> None:
        for paths in (["x.bin", "config.json"], ["vae/c.safetensors"]):
            with pytest.raises(ConfigError, match="it: no safetensors file"):
                tensor_files(manifest_of(*paths), {}, what="it")

    @pytest.mark.parametrize(
        ("index", "reason"),
        [
            (b"", "not valid JSON"),
            (b"\x00\xff", "not valid JSON"),
            (b"[" * 100_000, "nested too deeply"),
            (b"[]", "not a JSON object"),
            (b"{}", "has no weight_map"),
            (b'{"weight_map": {}}', "has no weight_map"),
            (b'{"weight_map": ["a"]}', "has no weight_map"),
            (b'{"weight_map": {"a": 1}}', "'a' is mapped to no file name"),
            (b'{"weight_map": {"a": null}}', "'a' is mapped to no file name"),
            (b'{"weight_map": {"a": "gone.safetensors"}}', r"names gone\.safetensors, which is not in the checkpoint"),
            (b'{"weight_map": {"a": "../up.safetensors"}}', "does not stay inside"),
            (b'{"weight_map": {"a": "/etc/x.safetensors"}}', "does not stay inside"),
            (b'{"weight_map": {"a": "x/../one.safetensors"}}', "does not stay inside"),
            (b'{"weight_map": {"a": "./one.safetensors"}}', "shortest form"),
            (b'{"weight_map": {"a": "one.safetensors\\n"}}', "unprintable"),
            (b'{"weight_map": {"a": "x.bin"}}', "is no safetensors file"),
            (b'{"weight_map": {"a": "one.safetensors", "a": "x.bin"}}', "'a' appears twice"),
        ],
        ids=lambda value: repr(value)[:40],
    )
    def test_an_index_that_lies_or_is_none_is_a_config_error(self, index: bytes, reason: str) -> None:
        manifest = manifest_of("one.safetensors", "x.bin", self.INDEX)
        with pytest.raises(ConfigError, match=rf"^it: model\.safetensors\.index\.json: .*{reason}"):
            tensor_files(manifest, {self.INDEX: index}, what="it")
