"""The parity rows, served by processes of vLLM that go on to the next while a test looks at the last."""

import json
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parity.table import REAL
from tests.vllm import vllm_process

ROW_TIMEOUT_S = 280.0
PROCESSES = 2  # of one thread each


class Rows:
    """One process and its rows."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.names = names
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = vllm_process.start(
                *("-m", "tests.parity.rows", str(folder), *names),
                environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._results: dict[str, dict[str, Any]] = {}

    def result(self, name: str) -> dict[str, Any]:
        """Return one row's result once it is there."""
        deadline = time.monotonic() + ROW_TIMEOUT_S
        assert self._process.stdout is not None
        while name not in self._results:
            left_s = deadline - time.monotonic()
            readable, _, _ = select.select([self._process.stdout], [], [], max(left_s, 0))
            assert readable, f"no result in {ROW_TIMEOUT_S:.0f} s: {self.last_words}"
            line = self._process.stdout.readline()
            assert line, f"vLLM's process ended: {self.last_words}"
            result = json.loads(line)
            self._results[result["row"]] = result
        return self._results[name]

    @property
    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def all_rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rows]]:
    """Start on every row that this run of the tests asks for, in its order."""
    asked = [item.callspec.params.get("row") for item in request.session.items if hasattr(item, "callspec")]
    names = list(dict.fromkeys(row for row in asked if isinstance(row, str)))
    if REAL in names:
        request.getfixturevalue("model_checkpoint")
    shares = [share for first in range(PROCESSES) if (share := names[first::PROCESSES])]
    processes: list[Rows] = []
    try:
        for share in shares:
            processes.append(Rows(tmp_path_factory.mktemp("rows"), share))
        yield processes
    finally:
        for process in processes:
            process.close()


@pytest.fixture
def rows(all_rows: list[Rows], row: str) -> Rows:
    """The process that serves this row."""
    return next(process for process in all_rows if row in process.names)
