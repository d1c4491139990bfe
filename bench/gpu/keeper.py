"""`python -m bench.gpu.keeper SETTINGS`: a real keeper, told by a file what otherwise a manifest tells it."""

import sys
from collections.abc import Callable
from pathlib import Path

from appliance.keeper import settings
from appliance.keeper.__main__ import main


def run(path: Path) -> int:
    """Run the keeper with these settings; return its exit status."""

    answer = path.read_bytes()

    async def child(manifest: Path, model: str, *options: str, on_progress: Callable[[str], None]) -> bytes:
        return answer

    settings._child = child
    sys.argv = ["keeper", "--manifest", str(path), "--model", "bench"]
    return main()


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
