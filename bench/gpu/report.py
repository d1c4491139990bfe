"""Results: a line for people at once, and a JSON line in a file, so that what was measured survives whatever comes."""

import argparse
import json
import time
from pathlib import Path
from typing import Any


class Report:
    """Tells results of one bench; `json_path` is appended to, a line a result."""

    def __init__(self, bench: str, json_path: Path | None) -> None:
        self._bench = bench
        self._json_path = json_path
        self.failures = 0

    def figure(self, name: str, value: float, unit: str, **facts: object) -> None:
        """Tell a number that was measured."""
        tail = "".join(f"  {key}={_shown(fact)}" for key, fact in facts.items())
        self.say(f"{name:<52} {value:12.3f} {unit}{tail}")
        self._write({"kind": "figure", "name": name, "value": value, "unit": unit, **facts})

    def check(self, name: str, ok: bool, detail: str = "", **facts: object) -> bool:
        """Tell whether something that must be true is."""
        self.failures += not ok
        self.say(f"{'ok    ' if ok else 'FAILED'} {name}{f': {detail}' if detail else ''}")
        self._write({"kind": "check", "name": name, "ok": ok, "detail": detail, **facts})
        return ok

    def note(self, text: str, **facts: object) -> None:
        """Tell what is neither."""
        self.say(f"       {text}")
        self._write({"kind": "note", "text": text, **facts})

    def say(self, text: str) -> None:
        print(f"[{self._bench}] {text}", flush=True)

    def _write(self, result: dict[str, Any]) -> None:
        if self._json_path is None:
            return
        with self._json_path.open("a") as file:
            file.write(json.dumps({"bench": self._bench, "time": round(time.time(), 3), **result}) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every bench has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="append results as JSON lines")
    made.add_argument("--fake", action="store_true", help="run on a GPU in host memory")
    return made


def _shown(fact: object) -> str:
    return f"{fact:.3f}" if isinstance(fact, float) else str(fact)
