"""vLLM's post-processing of weights that are mapped read-only: what of it is left to do, and what it may write to.

`process` is vLLM's own, for the whole of a module.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from appliance.tensors.inventory import TensorError

Process = Callable[[torch.nn.Module], None]


def process_loaded(module: torch.nn.Module, process: Process) -> None:
    """Post-process weights that are as the checkpoint has them."""
    _own_what_is_rewritten(module)
    process(module)


def process_again(module: torch.nn.Module, process: Process) -> None:
    """Rebuild what post-processing left beside tensors, where this vLLM can do no more than that.

    Where it cannot, a shard is `processed` only if nothing but tensors was changed. TensorError where it breaks off.
    """
    with _already_processed() as rebuilds:
        # Every one or none: vLLM breaks off at the first that does not support it.
        if not rebuilds or not _can_be_rebuilt(module):
            return
        try:
            process(module)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            raise TensorError(f"vLLM does not process these weights once more: {error}") from error


def _own_what_is_rewritten(module: torch.nn.Module) -> None:
    """Copy the mapped parameters that a quantization method may write to where they lie: the mapping is read-only.

    Methods of layers that are not quantized replace parameters, and write to none.
    """
    for part in module.modules():
        method = getattr(part, "quant_method", None)
        if method is None or type(method).__name__.startswith("Unquantized"):
            continue
        for parameter in part.parameters(recurse=False):
            parameter.data = parameter.data.clone()


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


def _can_be_rebuilt(module: torch.nn.Module) -> bool:
    methods = (getattr(part, "quant_method", None) for part in module.modules())
    # What has no such flag is no quantization method of vLLM's, and is left out by it.
    return all(getattr(method, "supports_pre_processed_weights", True) for method in methods)
