"""A whole keeper in the test's process, with children that say and do what a test tells them."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from appliance.client import KeeperClient
from appliance.errors import EXIT_CONFIG, EXIT_TRUST, ApplianceError
from appliance.fingerprint import Fingerprint
from appliance.keeper.custody import Custody
from appliance.keeper.keeper import Keeper
from appliance.keeper.settings import Refusal
from appliance.keeper.shard import Shard
from appliance.notify import Named, Notifier
from tests.keeper import loader
from tests.keeper.shards import LAYOUT, OTHER_TARGET, PAGE, TARGET, record_of, settings_json, shard_of
from tests.service_manager import ServiceManager

PYTHON = sys.executable
TIMEOUT_S = 20.0
BAD_SIGNATURE = Refusal("model.sig: not signed by a trusted key", EXIT_TRUST)
CORRUPT = Refusal("model.safetensors differs from its digest", EXIT_TRUST)

_CHILD = """#!{python} -IS
import sys
from pathlib import Path
folder = Path({folder!r})
answer = folder / ("verify" if "--verify" in sys.argv else "obtain")
with (folder / "asked").open("a") as asked:
    asked.write(answer.name + " ")
text = answer.read_text()
if text.isdigit():
    sys.exit(int(text))
if (answer.name == "verify"):
    print("progress reading model.safetensors", flush=True)
print(text)
"""


class Stage:
    """What the keeper's child process says, what its loader does, and what was asked of them."""

    def __init__(self, folder: Path, *, ranks: int = 2) -> None:
        self._folder = folder
        self.runtime = folder / "run" / "m"
        self.program = folder / "child"
        self.program.write_text(_CHILD.format(python=PYTHON, folder=str(folder)))
        self.program.chmod(0o755)
        self._ranks = ranks
        self.will_obtain()
        self.will_verify()
        self.will_load()

    @property
    def socket_path(self) -> Path:
        return self.runtime / "keeper.sock"

    def settings(self, **changes: Any) -> dict[str, Any]:
        script = [PYTHON, "-IS", loader.__file__, str(self.socket_path), str(self._folder)]
        asked: dict[str, Any] = {"ranks": self._ranks, "loader": script} | changes
        return settings_json(self.runtime, **asked)

    def will_obtain(self, *, status: int | None = None, **changes: Any) -> None:
        """Have the child answer with these settings, or end with a status."""
        (self._folder / "obtain").write_text(json.dumps(self.settings(**changes)) if status is None else str(status))

    def will_verify(self, *, status: int | None = None, **changes: Any) -> None:
        """Have the child that hashes the checkpoint answer with these settings, or end with a status."""
        (self._folder / "verify").write_text(json.dumps(self.settings(**changes)) if status is None else str(status))

    def will_load(self, *exits: int, target: Fingerprint = TARGET, ranks: Sequence[int] = (0, 1, 2)) -> None:
        """Have the loader end with these statuses one after the other; 0, or none left: donate every rank."""
        (self._folder / "exits").write_text(" ".join(map(str, exits)))
        donations = []
        for rank in ranks:
            record = record_of(target, rank=rank)
            offer = {"op": "offer", "role": "target", "rank": rank, "client": "loader", "target": target.to_json()}
            parts = [record.encode(LAYOUT), b'[["config.json",2]]\n{}', b"\1" * PAGE, b"\2" * PAGE]
            donations.append({"offer": {"v": 1, "replace": False, **offer}, "parts": [part.hex() for part in parts]})
        (self._folder / "donations").write_text(json.dumps(donations))

    @property
    def loads(self) -> int:
        """How often the loader was started."""
        path = self._folder / "runs"
        return path.stat().st_size if path.exists() else 0

    @property
    def asked(self) -> list[str]:
        """What the child was asked for: `obtain`, `verify`."""
        path = self._folder / "asked"
        return path.read_text().split() if path.exists() else []


class Life:
    """One life of a keeper: how it ended, or what it holds meanwhile."""

    def __init__(self, stage: Stage, keeper: Keeper, notifier: Notifier, task: "asyncio.Task[None]") -> None:
        self._stage = stage
        self._keeper = keeper
        self._notifier = notifier
        self._task = task
        self.holdings = keeper._holdings

    @property
    def exit_status(self) -> int | None:
        """The status it ended with, None while it lives."""
        if not self._task.done():
            return None
        error = self._task.exception()
        assert error is None or isinstance(error, ApplianceError), error
        return 0 if error is None else error.exit_status

    @property
    def held(self) -> set[tuple[str, int]]:
        """Root digest and rank of each shard."""
        return {(shard.record.target.root_digest, shard.record.rank) for shard in self.holdings.shards()}

    async def settled(self) -> None:
        """Return once it has ended, is resident for good, or has refused to go on loading."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self._task.done() and not self._is_settled():
                change = asyncio.ensure_future(self.holdings.changed())
                # What it tells the service manager is no change.
                await asyncio.wait({self._task, change}, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        if not self._task.done():
            # What it does next is done by the time it answers, and what it says then is heard.
            await self.status()
        await asyncio.to_thread(self._notifier.barrier)

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._status)

    async def stop(self) -> None:
        """Send SIGTERM and wait for the end."""
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait({self._task})

    def _status(self) -> dict[str, Any]:
        with KeeperClient.connect(self._stage.socket_path, timeout_s=TIMEOUT_S) as client:
            return client.status()

    def _is_settled(self) -> bool:
        if self.holdings.progress or not self._stage.asked:
            return False
        return bool(self.holdings.refusal) or self._keeper._ready


@contextlib.asynccontextmanager
async def living(stage: Stage, manager: ServiceManager, given: Sequence[Named] = ()) -> AsyncIterator[Life]:
    """Run a keeper; at the end of the block it is stopped with SIGTERM, if it still lives."""
    notifier = Notifier(manager.environ)
    keeper = Keeper(Path("appliance.yaml"), "m", notifier=notifier)
    life = Life(stage, keeper, notifier, asyncio.create_task(keeper.run(given)))
    await asyncio.sleep(0)  # it listens to SIGTERM from its first step on
    try:
        yield life
    finally:
        if not life._task.done():
            await life.stop()
        notifier.barrier()
        notifier.close()


def stored(manager: ServiceManager, *shards: Shard, settings: dict[str, Any] | None) -> list[Named]:
    """Store what an earlier life left, and return what the service manager hands to the next."""
    notifier = Notifier(manager.environ)
    custody = Custody(notifier)
    if settings is not None:
        custody.store_settings(json.dumps(settings).encode())
    for shard in shards:
        custody.store(shard)
        shard.close()
    notifier.barrier()
    notifier.close()
    return manager.handed_over()


def given_back(stage: Stage, manager: ServiceManager, given: str) -> list[Named]:
    """Return what the service manager hands over: nothing, the same weights, another's, or a part of the same."""
    target, ranks = {
        "nothing": (TARGET, ()),
        "the same": (TARGET, (0, 1)),
        "another": (OTHER_TARGET, (0, 1)),
        "a part": (TARGET, (0,)),
    }[given]
    settings = stage.settings(target=target) if ranks else None
    return stored(manager, *(shard_of(target, rank=rank) for rank in ranks), settings=settings)


def set_up(stage: Stage, checkpoint: str, loader: str) -> None:
    """Have the checkpoint be fine, refused, corrupt or behind a broken manifest; and the loader as its word says."""
    if checkpoint == "refused":
        stage.will_obtain(refusal=BAD_SIGNATURE)
    elif checkpoint == "broken manifest":
        stage.will_obtain(status=EXIT_CONFIG)
    elif checkpoint == "corrupt":
        stage.will_verify(refusal=CORRUPT)
    stage.will_load(*{"works": (), "fails once": (1,), "refuses": (EXIT_TRUST,)}[loader])
