"""The heavy imports of an engine, in one place: they are most of a restart once the weights no longer are.

Two thousand modules make the garbage collector walk a growing heap over and over, a quarter of the whole; it is off
while they load, and what they leave behind is never looked at again.
"""

import contextlib
import gc
import importlib
import sys
import time
from collections.abc import Iterator

from appliance.collector import paused

HEAVY = (
    "torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation",
)


def import_heavy_modules() -> float:
    """Import torch and the parts of transformers that every model needs; return the seconds that took.

    What is there already is frozen by whoever imported it: by now there are models, which must not be kept for good.
    """
    started = time.perf_counter()
    if sys.modules.keys() >= set(HEAVY):
        return time.perf_counter() - started
    with paused():
        for name in HEAVY:
            importlib.import_module(name)
        gc.freeze()
    return time.perf_counter() - started


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Transformers prints progress bars, advice, and a coloured report of what the caller raises as one error."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
