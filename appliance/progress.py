"""Words for how far a read of a checkpoint is, as status lines show them."""

from collections.abc import Callable

from appliance.checkpoint.streams import OnProgress, Progress


def in_words(doing: str, progress: Progress) -> str:
    """Return a line like `loading 34/66 files, 12.3 GiB verified`."""
    return f"{doing} {progress} verified"


def telling(doing: str, tell: Callable[[str], None]) -> OnProgress:
    """Return a callback for a read that tells each step in words."""
    return lambda progress: tell(in_words(doing, progress))
