"""vLLM's post-processing of weights that are mapped read-only: what of it is left to do, and what it may write to.

`process` is vLLM's own, for the whole of a module.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch

from appliance.errors import ApplianceError, ConfigError
from appliance.tensors.homes import Stage
from appliance.tensors.inventory import TensorError, walk
from appliance.tensors.slot import Slot
from appliance.vllm.experts import experts_of, knows_of_processed_weights, set_kernel_up

Process = Callable[[torch.nn.Module], None]

# What latent attention makes of its projection, also where that is processed already.
_DERIVED = frozenset({"W_UV", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale"})

# Backends for experts that are not quantized, which lay them out where they are.
_REWRITING = frozenset({"FLASHINFER_TRTLLM"})

# What vLLM marks a parameter with that it lets go of, as since 0.33.
_LET_GO = "requantization_source"


def quantizes_while_loading(module: torch.nn.Module, stage: Stage) -> bool:
    """Tell whether vLLM quantizes each layer of a new module as soon as it has read it, and finishes that afterwards.

    ConfigError at stage `loaded`: such weights are not as the checkpoint has them.
    """
    methods = (getattr(part, "quant_method", None) for part in module.modules())
    quantizes = any(getattr(method, "uses_meta_device", False) for method in methods)
    if quantizes and stage == "loaded":
        raise ConfigError(
            "these weights are quantized while they are loaded, and no other process can have what that leaves",
            hint="quantize the checkpoint, and leave `quantization` out",
        )
    return quantizes


def process_loaded(module: torch.nn.Module, process: Process) -> None:
    """Post-process weights that are as the checkpoint has them."""
    copied = _own_what_is_rewritten(module)
    with _replaced_elsewhere(module, set(module.parameters()) - copied):
        process(module)


def process_again(module: torch.nn.Module, process: Process, *, opaque: Collection[type] = ()) -> None:
    """Rebuild what post-processing left beside tensors, where this vLLM can do no more than that.

    Tensors stay those of the shard: vLLM's own mode moves some, as scales of attention to the host. Where there is no
    such mode, a shard is `processed` only if nothing but tensors and the kernels of experts was changed. TensorError
    where it breaks off.
    """
    with _already_processed() as rebuilds:
        # Every one or none: vLLM breaks off at the first that does not support it.
        by_itself = rebuilds and _can_be_rebuilt(module)
        experts = experts_of(module) if rebuilds and not by_itself else []
        if not by_itself and not experts:
            return
        given = list(walk(module, opaque=opaque).slots.values())
        try:
            if by_itself:
                _set_derived_aside(module)
                process(module)
            for layer in experts:
                set_kernel_up(layer)
            for slot in given:
                if _now(slot) is not slot.value:
                    slot.put(slot.value)
        except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError, ApplianceError):
            raise
        except Exception as error:
            # It may look for what is gone by then, or leave a tuple or list that has no place for what was in it.
            said = str(error) or type(error).__name__
            raise TensorError(f"vLLM does not process these weights once more: {said}") from error


def _own_what_is_rewritten(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Copy the mapped parameters that a quantization method may write to where they lie: the mapping is read-only.

    Return them.

    Methods of layers that are not quantized replace parameters, and write to none, but for one kernel of experts.
    """
    copied = set()
    for part in module.modules():
        method = getattr(part, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
        if method is None or (type(method).__name__.startswith("Unquantized") and backend not in _REWRITING):
            continue
        for parameter in part.parameters(recurse=False):
            parameter.data = parameter.data.clone()
            copied.add(parameter)
    return copied


@contextlib.contextmanager
def _replaced_elsewhere(module: torch.nn.Module, mapped: set[torch.nn.Parameter]) -> Iterator[None]:
    """Have vLLM make a new parameter of each of these that it lays out anew, and write to none.

    Since 0.33 it writes to where the old one lies, but for one that it quantizes again, and lets go of: that is marked.
    """
    own = {parameter for parameter in module.parameters() if hasattr(parameter, _LET_GO)}
    marked = mapped - own
    for parameter in marked:
        setattr(parameter, _LET_GO, True)
    try:
        yield
    finally:
        # What is made of a parameter may get its attributes.
        for parameter in (marked | set(module.parameters())) - own:
            vars(parameter).pop(_LET_GO, None)


@contextlib.contextmanager
def _already_processed() -> Iterator[bool]:
    """Tell whether this vLLM knows of weights that are processed already, as since 0.30, and have it take them so."""
    try:
        from vllm.model_executor.utils import weights_already_processed
    except ImportError:
        yield False
        return
    with weights_already_processed():
        yield True


def _now(slot: Slot) -> object:
    try:
        return slot.get()
    except (KeyError, IndexError):
        return None


def _can_be_rebuilt(module: torch.nn.Module) -> bool:
    return all(knows_of_processed_weights(getattr(part, "quant_method", None)) for part in module.modules())


def _set_derived_aside(module: torch.nn.Module) -> None:
    """Have attention make anew what it would write to where the last one lies, which is mapped."""
    for part in module.modules():
        if not hasattr(part, "process_weights_after_loading"):
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            if name in _DERIVED:
                # Of another shape, so that nothing is copied to it.
                setattr(part, name, torch.nn.Parameter(parameter.new_empty(0), requires_grad=False))
