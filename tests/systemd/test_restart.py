import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from appliance.canary import CanaryRecord, api_key, ask
from appliance.cli.main import run
from appliance.errors import ApplianceError, HostError, TrustError
from appliance.fingerprint import Fingerprint
from appliance.host import restart as restarts
from appliance.host.applied import running
from appliance.host.restart import restart
from appliance.manifest.schema import Manifest
from tests.systemd.manifests import manifest_of, model, put_applied

# How often a server looks whether it shall end.
POLL_S = 0.01
FINGERPRINT = Fingerprint.of({"root_digest": "a"})
ENGINE_SAYS: dict[str, Any] = {
    "/health": {"verdict": "hit", "phases_s": {"imports": 2.0}},
    "/v1/completions": {"choices": [{"token_ids": [1, 2, 3]}]},
}


@pytest.fixture
def engine() -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the port of an engine, and what it answers to each path."""
    says = dict(ENGINE_SAYS)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(says[self.path]).encode()
            wanted = says.get("key", "") if self.command == "POST" else ""
            refused = wanted and self.headers["Authorization"] != f"Bearer {wanted}"
            self.send_response(401 if refused else 200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[POLL_S])
        thread.start()
        yield server.server_port, says
        server.shutdown()
        thread.join()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(restarts, "systemctl", lambda *words, timeout_s: said.append(" ".join(words)))
    monkeypatch.setattr(restarts, "resident_fingerprint", lambda path: FINGERPRINT)
    return said


Restart = Callable[[], restarts.Timeline]


@pytest.fixture
def act(tmp_path: Path, engine: tuple[int, dict[str, Any]], commands: list[str]) -> Restart:
    manifest = manifest_of(tmp_path, {"m": model(engine[0])}, directories={"state": str(tmp_path)})
    return lambda: restart(manifest, "m", tell=lambda text: None)


def test_a_restart_that_is_a_hit_and_says_the_same_is_proven(act: Restart, commands: list[str], tmp_path: Path) -> None:
    CanaryRecord.of(tmp_path, FINGERPRINT).save([1, 2, 3])
    timeline = act()
    assert commands == ["restart engine@m.service"]
    assert (timeline.verdict, timeline.canary) == ("hit", "3 tokens as recorded")
    assert list(timeline.steps_s) == ["drain, restart, ready", "canary"] and timeline.phases_s == {"imports": 2.0}


def test_other_tokens_than_recorded_are_not_to_be_trusted(act: Restart, tmp_path: Path) -> None:
    CanaryRecord.of(tmp_path, FINGERPRINT).save([1, 2, 4])
    with pytest.raises(TrustError, match=r"\[1, 2, 3\], and \[1, 2, 4\] were recorded") as caught:
        act()
    # Without an eviction the keeper would go on with the very same bytes.
    hint = caught.value.hint or ""
    assert hint.index("stop engine@m") < hint.index("appliance evict m") < hint.index("restart weights@m")


def test_weights_that_were_not_the_keepers_are_off(act: Restart, engine: tuple[int, dict[str, Any]]) -> None:
    engine[1]["/health"] = {"verdict": "donated", "phases_s": {}}
    with pytest.raises(HostError, match="'donated', not 'hit'"):
        act()


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"token_ids": None}]}, {"choices": [{}]}, []])
def test_an_answer_without_tokens_is_an_error(engine: tuple[int, dict[str, Any]], answer: object) -> None:
    engine[1]["/v1/completions"] = answer
    with pytest.raises(ApplianceError):
        ask(f"http://127.0.0.1:{engine[0]}", "m")


@pytest.mark.parametrize(
    "settings",
    [
        {"args": ["--api-key", "sesame"]},
        {"args": ["--api-key", "first", "--api_key=sesame"], "environment": {"VLLM_API_KEY": "not this"}},
        {"environment": {"VLLM_API_KEY": "sesame"}},
    ],
    ids=["argument", "the last of two", "environment"],
)
def test_an_engine_that_asks_for_a_key_is_given_it(
    tmp_path: Path,
    engine: tuple[int, dict[str, Any]],
    commands: list[str],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    engine[1]["key"] = "sesame"
    monkeypatch.setattr(restarts, "_attachment", lambda manifest, name, base: ("hit", {}))
    models = {"m": model(engine[0], engine={"kind": "vllm", **settings})}
    manifest = manifest_of(tmp_path, models, directories={"state": str(tmp_path)})
    assert restart(manifest, "m", tell=lambda text: None).canary.startswith("no tokens were recorded")


def test_an_argument_without_its_value_is_no_key() -> None:
    assert api_key(["--api-key"], {"VLLM_API_KEY": "x"}) == ""
    assert api_key(["--model", "--api-keys=1"], {}) == ""


def test_an_engine_that_is_not_there_is_an_error() -> None:
    with pytest.raises(HostError, match="is the engine running"):
        ask("http://127.0.0.1:1", "m")


@pytest.mark.parametrize(("was_applied", "port"), [(True, 8001), (False, 8002)])
def test_it_is_the_applied_manifest_that_is_gone_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_applied: bool, port: int
) -> None:
    source, root = tmp_path / "appliance.yaml", tmp_path / "root"
    before = manifest_of(tmp_path, {"m": model(8001)})
    if was_applied:
        put_applied(before, source, root=root)
    manifest_of(tmp_path, {"m": model(8002)})
    asked: list[int] = []

    def noted(manifest: Manifest, name: str, **more: object) -> restarts.Timeline:
        asked.append(manifest.model(name).engine.port)
        return restarts.Timeline()

    monkeypatch.setattr(restarts, "restart", noted)
    monkeypatch.setattr("appliance.cli.host.running", partial(running, root=root))
    assert run(["restart", "m", "--manifest", str(source)]) == 0
    assert asked == [port]
