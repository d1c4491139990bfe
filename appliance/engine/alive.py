"""`python -m appliance.engine.alive URL`: a container's health check. Ends with 0 where the engine does its work.

One that drains does: it answers 503 to everybody, and is not to be killed for that.
"""

import json
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 15.0


def is_alive(url: str) -> bool:
    """Tell whether an engine's /health says that its model still answers, or that it is draining."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310
            body = response.read()
    except urllib.error.HTTPError as error:
        with error:
            body = error.read()
    except OSError:
        return False
    try:
        return json.loads(body)["status"] in ("ok", "draining")
    except (ValueError, KeyError, TypeError):
        return False


if __name__ == "__main__":
    sys.exit(not is_alive(sys.argv[1]))
