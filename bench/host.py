"""The appliance under a real systemd, with a real model: how long restarts take, and what clients notice.

    python -m bench.host [--kind trixie] [--rounds N] [--json FILE]

As root: it boots a host in a container and runs install.sh in there. `attached` and `from disk` are from `systemctl` to
the first token of a request over HTTP; files are in the page cache.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from appliance.demo.cache import default_cache
from appliance.demo.model import obtain
from appliance.host.apply import write_files
from appliance.host.plan import make_plan
from appliance.host.unit_files import unit_files
from appliance.manifest.load import load_manifest
from tests.host.installed import MODEL, PORT, Host, installed
from tests.host.stream import Stream, ask

WEIGHTS, ENGINE = f"weights@{MODEL}.service", f"engine@{MODEL}.service"
START_TIMEOUT_S = 600.0
DESCRIPTORS = (4, 200)
# Beside its slabs a shard has a record and configs, and the keeper one descriptor of its own: 4 is one slab.
OTHERS = 3
MODELS = 100
POLL_S = 0.02
PYTHON = "/opt/appliance/current/bin/python"


def restart_attached(host: Host) -> float:
    return _until_first_token(lambda: host.machine.systemctl("restart", "--no-block", ENGINE))


def restart_from_disk(host: Host) -> float:
    host.machine.systemctl("stop", WEIGHTS, timeout_s=START_TIMEOUT_S)
    return _until_first_token(lambda: host.machine.systemctl("start", "--no-block", WEIGHTS, ENGINE))


def requests_during_a_restart(host: Host) -> dict[str, int]:
    with Stream(PORT, MODEL) as stream:
        host.machine.wait_for(lambda: len(stream.answers) > 1, what="it answers")
        host.machine.systemctl("restart", ENGINE, timeout_s=START_TIMEOUT_S)
        answered = len(stream.answers)
        host.machine.wait_for(lambda: len(stream.answers) > answered + 1, what="it answers")
    return {name: stream.outcomes[name] for name in ("answered", "refused", "failed")}


def keeper_restarts(host: Host, descriptors: int, rounds: int) -> list[float]:
    host.machine.systemctl("stop", ENGINE, timeout_s=START_TIMEOUT_S)
    host.appliance("evict", MODEL, "--force")
    slabs = str(descriptors - OTHERS)
    done = host.machine.run([PYTHON, "/root/host_keeper.py", MODEL, slabs, str(rounds)], timeout_s=START_TIMEOUT_S)
    found: list[float] = json.loads(done.stdout)
    return found


def planning(folder: Path) -> float:
    """Return the seconds that it takes to read a manifest of many models, plan all their files and write them."""
    models = {f"m{n}": {"checkpoint": f"/srv/{n}", "engine": {"port": 8000 + n}} for n in range(MODELS)}
    path = folder / "many.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    began = time.perf_counter()
    plan = make_plan(unit_files(load_manifest(path), PurePosixPath(path), {}), folder)
    write_files(plan.changes, folder / "generated")
    return time.perf_counter() - began


def measure(host: Host, folder: Path, rounds: int) -> dict[str, Any]:
    """Return every measurement, in seconds but for the counts of requests."""
    host.put_checkpoint(obtain(default_cache(), on_progress=print))
    host.put_manifest({MODEL: {"checkpoint": f"/srv/models/{MODEL}", "engine": {"port": PORT}}})
    host.apply()
    host.machine.copy_in(Path(__file__).with_name("host_keeper.py"), "/root/host_keeper.py")
    found: dict[str, Any] = {"attached_s": [], "from_disk_s": [], "requests": []}
    for _ in range(rounds):
        found["attached_s"].append(restart_attached(host))
        found["from_disk_s"].append(restart_from_disk(host))
        found["requests"].append(requests_during_a_restart(host))
    found["keeper_restart_s"] = {str(count): keeper_restarts(host, count, rounds) for count in DESCRIPTORS}
    found["plan_100_models_s"] = [planning(folder) for _ in range(rounds)]
    return found


def _until_first_token(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    down = False
    while time.monotonic() - began < START_TIMEOUT_S:
        try:
            ask(PORT, MODEL, tokens=1)
            if down:
                return time.monotonic() - began
        except OSError:
            down = True
        time.sleep(POLL_S)
    raise TimeoutError("no answer")


def _table(found: dict[str, Any]) -> str:
    rows = [
        ("restart to first token, attached", found["attached_s"]),
        ("stopped to first token, weights from disk", found["from_disk_s"]),
        *((f"keeper restart, {count} descriptors", times) for count, times in found["keeper_restart_s"].items()),
        (f"plan {MODELS} models", found["plan_100_models_s"]),
    ]
    lines = [f"{name:<45} {statistics.median(times):8.3f} s  (of {len(times)})" for name, times in rows]
    lines += [f"{'requests during a restart':<45} {counts}" for counts in found["requests"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("trixie", "bookworm"), default="trixie")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, installed(arguments.kind, Path(name)) as host:
        found = measure(host, Path(name), arguments.rounds)
    print(_table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
