"""`python -m appliance.engine.alive URL`: a container's health check. Ends with 1 where the engine has to be killed.

One that drains has not: it answers 503 to everybody. Nor one that does not listen yet: systemd sees to it that it
starts in time, and a check that fails would be a failed unit of the host's at every start.
"""

import json
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 15.0


def is_alive(url: str) -> bool:
    """Tell whether an engine's /health is 200, or says that it is draining; or nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310
            response.read()
            return True
    except urllib.error.HTTPError as error:
        with error:
            body = error.read()
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)
    except OSError:
        return False
    try:
        return bool(json.loads(body)["status"] == "draining")
    except (ValueError, KeyError, TypeError):
        return False


if __name__ == "__main__":
    sys.exit(not is_alive(sys.argv[1]))
