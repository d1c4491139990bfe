"""What a health probe does."""

import urllib.error
import urllib.request


def got(url: str) -> tuple[int, str, str]:
    """Return status, content type and body."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()
