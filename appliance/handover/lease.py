"""The lease of an attached shard: an open connection to the keeper, made again whenever the keeper comes back."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from appliance.client import KeeperClient, RefusedError
from appliance.errors import ApplianceError
from appliance.events import WARNING, event
from appliance.verdict import Reason

RETRY_S = 0.5


def end_process() -> None:
    """Ask this process to end as whoever runs it would; that one starts it again."""
    os.kill(os.getpid(), signal.SIGTERM)


class Lease:
    """Owns the connection and the thread that watches it. The mapping itself needs neither to stay valid.

    `leave` is called where the keeper needs this shard's memory for the weights that replace it.
    """

    def __init__(
        self,
        client: KeeperClient,
        path: Path,
        *,
        shard_id: str,
        name: str,
        leave: Callable[[], None] = end_process,
    ) -> None:
        self._client: KeeperClient | None = client
        self._path = path
        self._shard_id = shard_id
        self._name = name
        self._leave = leave
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="lease", daemon=True)
        self._thread.start()

    @property
    def held(self) -> bool:
        """Whether a keeper knows at this moment that the shard is mapped here."""
        return self._client is not None

    @property
    def alive(self) -> bool:
        """Whether the shard is leased, or will be when its keeper is back; False once that holds other weights."""
        return self._thread.is_alive()

    def use(self, act: Callable[[KeeperClient], None]) -> None:
        """Do something over the connection, if there is one; a keeper that just went away is no error."""
        with self._lock, contextlib.suppress(ApplianceError):
            if self._client is not None:
                act(self._client)

    def end(self) -> None:
        """Close the connection: nothing is mapped any more."""
        self._ended.set()
        with self._lock:
            if self._client is not None:
                self._client.close()
        self._thread.join()

    def _watch(self) -> None:
        client = self._client
        while client is not None:
            while (why := client.wait_for_hangup()) is not None:
                # The lease stays until the memory is really given back, with the process.
                self._go(why)
            with self._lock:
                self._client = None
                client.close()
            if self._ended.is_set():
                return
            event(
                "the keeper is gone; the weights stay mapped, and the lease is renewed when it is back",
                priority=WARNING,
            )
            client = self._renewed()
            with self._lock:
                self._client = client
                if client is not None and self._ended.is_set():
                    client.close()

    def _go(self, why: str) -> None:
        if not self._ended.is_set():
            event(f"ending, to come back with other weights: {why}", priority=WARNING)
            self._leave()

    def _renewed(self) -> KeeperClient | None:
        while not self._ended.wait(RETRY_S):
            try:
                client = KeeperClient.connect(self._path)
            except ApplianceError:
                continue
            try:
                client.renew(shard_id=self._shard_id, client=self._name)
            except RefusedError as error:
                client.close()
                if error.verdict.reason is Reason.NO_ROOM:
                    self._go(error.verdict.detail)
                    return None
                event(f"the keeper that came back holds other weights: {error}", priority=WARNING)
                return None
            except ApplianceError:
                client.close()
                continue
            event("the keeper is back; lease renewed")
            return client
        return None
