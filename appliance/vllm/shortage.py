"""What torch, Python and vLLM raise where memory is short, as an error that says which memory, and what to do.

torch has a class for a GPU's alone: a CPU's shortage is told from other errors by its text, and so is vLLM's cache that
does not fit, and whatever vLLM's worker processes raise, which reaches us as text.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from appliance.errors import ApplianceError, ResourceError

_SHOWN_CHARS = 300

_GPU = (
    "GPU memory",
    ("stop what else uses the GPU, `appliance status` shows what does; or divide the model over more with `parallel`"),
)
_HOST = "host memory", "stop what else runs on this host, or do this on one that has more memory"
_CACHE = (
    "memory for vLLM's cache",
    (
        "stop what else uses that memory, or give `engine.args` a smaller --max-model-len, or another "
        "--gpu-memory-utilization"
    ),
)

_TEXTS = (
    # vLLM's first: it may quote others.
    ("available memory for the cache blocks", _CACHE),
    ("larger than the available KV cache memory", _CACHE),
    ("less than desired GPU memory utilization", _CACHE),
    ("less than desired CPU memory utilization", _CACHE),
    ("can't allocate memory", _HOST),
    ("Cannot allocate memory", _HOST),
    ("out of memory", _GPU),
)


@contextmanager
def telling_shortage(doing: str) -> Iterator[None]:
    """Have a shortage of memory end what is done inside with a ResourceError; other errors pass as they are."""
    try:
        yield
    except ApplianceError:
        raise
    except Exception as error:
        if (found := shortage(error, doing)) is None:
            raise
        raise found from error


def shortage(error: BaseException, doing: str) -> ResourceError | None:
    """Return what to tell an operator where this error, or one that it comes of, is a shortage of memory; else None."""
    cause: BaseException | None = error
    seen: list[BaseException] = []  # an error may be raised from itself
    while cause is not None and cause not in seen:
        seen.append(cause)
        if (kind := _kind(cause)) is not None:
            what, hint = kind
            said = " ".join(str(cause).split())[:_SHOWN_CHARS]
            return ResourceError(f"{doing}: {what} ran out{said and f': {said}'}", hint=hint)
        # As Python shows them.
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _kind(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, torch.OutOfMemoryError):
        return _GPU
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return _HOST
    if not isinstance(error, RuntimeError | ValueError):
        return None
    return next((kind for text, kind in _TEXTS if text in str(error)), None)
