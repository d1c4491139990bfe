"""Stands in for `vllm serve`: listens where it is told to, and behaves as the folder in FAKE_FOLDER says.

It leaves `started` (its arguments and environment) there, and `stopped` when a signal ended it. `sick` makes /health
fail; `exit` holds a status to end with at once, `dies` one to end with at the first question; `outcome` is what a
worker of it found, in place of a hit; `unasked` means that none asked for anything.
"""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["FAKE_FOLDER"])
HIT = {"role": "target", "rank": 0, "verdict": "hit"}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        sick = (FOLDER / "sick").exists()
        self._answer(503 if sick else 200, {})
        if sick:
            with (FOLDER / "asked-while-sick").open("a") as file:
                file.write("x")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if (FOLDER / "dies").exists():
            os._exit(int((FOLDER / "dies").read_text()))
        key = os.environ.get("FAKE_KEY", "")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._answer(401, {})
        elif (FOLDER / "embeds").exists():
            self._answer(404, {})
        else:
            self._answer(200, {"choices": [{"token_ids": [5, 6, 7]}]})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    arguments = sys.argv[1:]
    (FOLDER / "started.partial").write_text(
        json.dumps({"parent": os.getppid(), "arguments": arguments, "environment": dict(os.environ)})
    )
    (FOLDER / "started.partial").rename(FOLDER / "started")
    if not (FOLDER / "unasked").exists():
        found = FOLDER / "outcome"
        outcome = Path(os.environ["APPLIANCE_OUTCOMES"]) / "target-0.json"
        outcome.write_text(found.read_text() if found.exists() else json.dumps(HIT))
    if (FOLDER / "exit").exists():
        sys.exit(int((FOLDER / "exit").read_text()))
    port = int(arguments[arguments.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)

    def stop(number: int, frame: object) -> None:
        (FOLDER / "stopped").write_text(str(number))
        os._exit(int((FOLDER / "exit-stopped").read_text()) if (FOLDER / "exit-stopped").exists() else 0)

    signal.signal(signal.SIGTERM, stop)
    server.serve_forever()


if __name__ == "__main__":
    main()
