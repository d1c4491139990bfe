"""Requests to an engine, one after another, for as long as it takes; and what became of each."""

import json
import threading
import urllib.error
import urllib.request
from collections import Counter

PROMPT = "The weights stay"
TOKENS = 8
TIMEOUT_S = 30.0
# Short against a restart, long against the load of a machine of two cores.
PAUSE_S = 0.05


class Stream:
    """Runs in a thread of its own from `with` to its end. Every answer is the whole greedy one, or it is told apart."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream")
        self.answers: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def last(self) -> str:
        return self.answers[-1] if self.answers else ""

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            try:
                self.answers.append(ask(self._port, self._model))
                self.outcomes["answered"] += 1
            except (urllib.error.HTTPError, ConnectionRefusedError):
                self.outcomes["refused"] += 1  # 503 while it drains, nobody there while it starts
            except (OSError, ValueError, KeyError) as error:
                self.outcomes["failed"] += 1
                self.failures.append(f"{type(error).__name__}: {error}")


def ask(port: int, model: str, *, tokens: int = TOKENS) -> str:
    """Return a greedy answer; the OSError of urllib where there is none."""
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": tokens}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        error.close()
        raise
    except urllib.error.URLError as error:
        raise (error.reason if isinstance(error.reason, OSError) else error) from error
    return str(answer["choices"][0]["text"])
