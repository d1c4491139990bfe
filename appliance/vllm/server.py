"""What `engine@MODEL.service` runs where the engine is vLLM: starts `vllm serve`, and answers for it to systemd.

READY=1 once /health answers and a first answer came; the watchdog is fed for as long as it does; SIGTERM lets requests
end; vLLM's exit status is ours, unless a worker said better what is wrong.
"""

import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance import canary, configs
from appliance.canary import CanaryRecord
from appliance.checkpoint.contents import check_configs, read_configs
from appliance.client import KeeperClient, RefusedError, resident_fingerprint
from appliance.errors import ApplianceError, ConfigError, HostError, TrustError
from appliance.events import WARNING, event
from appliance.notify import Notifier
from appliance.quantities import format_phases
from appliance.target import DRAFT, TARGET, Target
from appliance.vllm.arguments import serve_arguments
from appliance.vllm.assignment import OUTCOMES_VARIABLE, STARTER_VARIABLE
from appliance.vllm.configs_folder import kept_configs
from appliance.vllm.environment import environment, make_cache_folder
from appliance.vllm.outcome import failure, read_all
from appliance.vllm.refusals import OTHER_LOADERS

POLL_S = 0.1
HEALTH_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 50  # below TimeoutStopSec= of the unit
WAIT_EXTENSION_S = 120.0
TELL_S = 5.0
# The first start on a GPU compiles and tunes for many minutes.
START_LIMIT_S = 3600.0
DEFAULT_WATCHDOG_S = 60.0


def serve(target: Target, manifest: Path, *, notifier: Notifier, phases_s: dict[str, float]) -> int:
    """Serve until SIGTERM; return vLLM's exit status. The error of the rank that has no weights, if one has not."""
    began = time.monotonic()
    folder = _configs(target, TARGET, notifier)
    draft_folder = None if target.draft is None else _configs(target, DRAFT, notifier)
    make_cache_folder(target)
    arguments = serve_arguments(target.name, target.model, configs=folder, draft_configs=draft_folder)
    # Ahead of the manifest's arguments, which win in whatever form they say the same.
    arguments[1:1] = ["--shutdown-timeout", str(STOP_TIMEOUT_S - 10)]
    if target.model.parallel.data > 1:
        # One for each replica, as vLLM would have it, breaks off on SIGTERM what the engines would still answer.
        arguments[1:1] = ["--api-server-count", "1"]
    phases_s["configs"] = time.monotonic() - began
    with tempfile.TemporaryDirectory(prefix="appliance-outcomes-") as outcomes:
        own = {OUTCOMES_VARIABLE: outcomes, STARTER_VARIABLE: str(os.getpid())}
        environ = {**os.environ, **environment(target, manifest), **own}
        # Its own children talk to vLLM, not to systemd.
        for variable in ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"):
            environ.pop(variable, None)
        server = _Server(target, arguments, environ, Path(outcomes), notifier)
        return server.run(phases_s)


class _Server:
    """One `vllm serve`, from its start to its end."""

    def __init__(
        self, target: Target, arguments: list[str], environ: dict[str, str], outcomes: Path, notifier: Notifier
    ) -> None:
        self._target = target
        self._outcomes = outcomes
        self._notifier = notifier
        self._stopping = False
        self._base = target.model.engine.base_url
        self._key = canary.api_key(arguments, environ)
        self._child = subprocess.Popen([sys.executable, "-m", "appliance.vllm.command_line", *arguments], env=environ)

    def run(self, phases_s: dict[str, float]) -> int:
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        try:
            began = time.monotonic()
            if self._until(self._healthy, "vLLM is starting"):
                phases_s["vllm"] = time.monotonic() - began
                self._refuse_unverified()
                if self._answers(phases_s):
                    self._ready(phases_s)
                    self._watch()
            status = self._child.wait()
        finally:
            if self._child.poll() is None:
                self._child.kill()
                self._child.wait()
        return self._ended(status)

    def _stop(self, number: int, frame: object) -> None:
        if not self._stopping:
            self._stopping = True
            self._notifier.stopping("letting requests end")
        self._child.send_signal(number)

    def _until(self, holds: Callable[[], bool], doing: str) -> bool:
        """Return True once it holds, False where vLLM ended before."""
        began = told = time.monotonic()
        _waiting(self._notifier, doing)
        while self._child.poll() is None:
            if holds():
                return True
            # One that never gets there is ended by the unit's own limit.
            if (now := time.monotonic()) - told > TELL_S and now - began < START_LIMIT_S:
                told = now
                _waiting(self._notifier, doing)
            time.sleep(POLL_S)
        return False

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._base}/health", timeout=HEALTH_TIMEOUT_S) as answer:  # noqa: S310
                return bool(answer.status == http.client.OK)
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return False

    def _refuse_unverified(self) -> None:
        """Refuse to serve what no worker had from us: vLLM may choose another loader than it is told."""
        if not read_all(self._outcomes):
            raise ConfigError(
                f"vLLM serves {self._target.name} with weights that it did not ask the keeper for",
                hint=OTHER_LOADERS,
            )

    def _ready(self, phases_s: dict[str, float]) -> None:
        outcomes = read_all(self._outcomes)
        worst = next((one for one in outcomes if one.verdict != "hit"), outcomes[0])
        slowest = {f"worker.{name}": 0.0 for one in outcomes for name in one.phases_s}
        for one in outcomes:
            for name, seconds in one.phases_s.items():
                slowest[f"worker.{name}"] = max(slowest[f"worker.{name}"], seconds)
        event(
            f"weights: {worst.verdict} ({worst.stage}, {len(outcomes)} ranks); {format_phases(phases_s | slowest)}",
            model=self._target.name,
            verdict=worst.verdict,
            root_digest=worst.root_digest,
        )
        engine = self._target.model.engine
        self._notifier.ready(f"{worst.verdict}: serving {self._target.name} on {engine.host}:{engine.port}")

    def _answers(self, phases_s: dict[str, float]) -> bool:
        """Ask the canary's question: READY=1 means that the weights work. False where vLLM is ending instead."""
        name, began = self._target.name, time.monotonic()
        try:
            tokens = canary.ask(self._base, name, api_key=self._key)
        except HostError as error:
            if self._child.poll() is not None or not self._healthy():
                return False
            # An embedding model, say, completes nothing.
            event(f"no canary for {name}: {error.message}", priority=WARNING, model=name)
            return True
        phases_s["first_answer"] = time.monotonic() - began
        try:
            self._record(tokens)
        except (ApplianceError, OSError) as error:
            event(f"the canary of {name} is not recorded: {error}", priority=WARNING, model=name)
        return True

    def _record(self, tokens: Sequence[int]) -> None:
        """Keep the first engine's tokens on these weights."""
        if self._target.model.mode == "copy":
            return  # its shard may be gone
        try:
            fingerprint = resident_fingerprint(self._target.socket_path)
        except RefusedError:
            return
        record = CanaryRecord.of(self._target.manifest.directories.state, fingerprint)
        if record.load() is None:
            record.save(tokens)

    def _watch(self) -> None:
        interval_s = (self._notifier.watchdog_s or DEFAULT_WATCHDOG_S) / 3
        while True:
            try:
                self._child.wait(interval_s)
                return
            except subprocess.TimeoutExpired:
                if self._stopping or self._healthy():
                    self._notifier.watchdog()

    def _ended(self, status: int) -> int:
        if (told := failure(self._outcomes)) is not None:
            raise told
        if self._stopping and status in (0, -signal.SIGTERM, -signal.SIGINT):
            return 0
        return status if status >= 0 else 128 - status


def _configs(target: Target, role: str, notifier: Notifier) -> Path:
    """Return a folder with the configs of a role's checkpoint."""
    identity = target.identity_of(role)
    files = _resident_configs(target, role, on_progress=lambda text: _waiting(notifier, text))
    if files is None:
        # Not resident, or of another checkpoint: what that means the workers know.
        files = read_configs(identity.root, identity.manifest)
    return kept_configs(target.manifest.directories.state, identity, files)


def _resident_configs(target: Target, role: str, *, on_progress: Callable[[str], None]) -> dict[str, bytes] | None:
    model = target.model
    # The draft is loaded by the last stage of the pipeline.
    rank = 0 if role == TARGET else (model.parallel.pipeline - 1) * model.parallel.tensor
    with KeeperClient.connect(target.socket_path, timeout_s=model.wait_s) as client:
        wait_s = 0.0 if model.on_miss == "load" else model.wait_s
        try:
            described = client.describe(role=role, rank=rank, wait_s=wait_s, on_progress=on_progress)
        except RefusedError:
            return None
    with described.configs:
        files = configs.unpack(described.configs)
    try:
        check_configs(target.identity_of(role).manifest, files)
    except TrustError:
        return None
    return files


def _waiting(notifier: Notifier, text: str) -> None:
    notifier.status(text)
    notifier.extend_timeout(WAIT_EXTENSION_S)
