"""Methods of vLLM's worker that write to the weights it has, refused where these are attached.

Whoever may send RPCs to an engine may call them: `LLM.collective_rpc`, and over HTTP, where VLLM_SERVER_DEV_MODE is
set, `/collective_rpc`, `/weight_checker` and `/sleep`. The mapping is read-only, so that a write would end the engine.
Weight transfer and balancing of experts are refused before, with the options that set them up; `load_model` is, where
it would have random weights served in their place.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from appliance.errors import ConfigError

Refuses = Callable[..., bool]

_MARK = "refuses_to_write"


def _always(*arguments: Any, **options: Any) -> bool:
    return True


def _discards(level: int = 1) -> bool:
    # From level 2 on, waking copies buffers back to where they lie.
    return int(level) > 1


def _invents(*, load_dummy_weights: bool = False) -> bool:
    return bool(load_dummy_weights)


WRITERS: dict[str, Refuses] = {
    "reload_weights": _always,
    "reset_weights": _always,  # since 0.32
    "elastic_ep_execute": _always,
    "sleep": _discards,
    "load_model": _invents,
}


def guard(worker: type, *, is_attached: Callable[[Any], bool]) -> None:
    """Have every worker of this class, whose weights `is_attached` says are, raise ConfigError where it is to write."""
    for name, refuses in WRITERS.items():
        method = getattr(worker, name, None)
        if method is not None and not hasattr(method, _MARK):
            setattr(worker, name, _guarded(method, refuses, is_attached))


def class_of(qualified_name: str) -> type:
    """Return the class of that name, as vLLM names the one of its workers."""
    module, _, name = qualified_name.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _guarded(method: Callable[..., Any], refuses: Refuses, is_attached: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(worker: Any, *arguments: Any, **options: Any) -> Any:
        if is_attached(worker) and refuses(*arguments, **options):
            raise ConfigError(
                f"{method.__name__}: attached weights are shared and read-only: they cannot be loaded anew in place, "
                "or written to otherwise",
                hint="put a new checkpoint in place of the old one and restart the engine; one that /sleep paused goes "
                "on after /wake_up",
            )
        return method(worker, *arguments, **options)

    vars(guarded)[_MARK] = True
    return guarded
