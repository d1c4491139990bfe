"""One rank's weights as vLLM makes them: its own skeleton, its own loading, its own post-processing."""

import contextlib
import copy
import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm.config
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe import expert_map_manager
from vllm.model_executor.model_loader import utils as vllm_loading
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
from vllm.utils.torch_utils import set_default_torch_dtype

from appliance.checkpoint.contents import read_configs
from appliance.checkpoint.identity import check_stats
from appliance.checkpoint.verification import verified_stats
from appliance.errors import ConfigError, TrustError
from appliance.handover.source import Loaded
from appliance.progress import telling
from appliance.slabs.devices import CPU
from appliance.target import DRAFT, TARGET, Target
from appliance.tensors.flags import flags_of
from appliance.tensors.homes import Stage
from appliance.vllm.environment import visible_device
from appliance.vllm.facts import facts
from appliance.vllm.processing import process_again, process_loaded, quantizes_while_loading


@dataclass
class _Layers:
    """What one model entered in vLLM's configuration: its layers by name, and the names of those with experts."""

    by_name: dict[str, Any] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)


class VllmSource:
    """The weights that one worker of vLLM asks its model loader for. `target` is None for one that only attaches.

    A draft has the rank of the model that it drafts for, `target_rank`: its configuration may know of no replicas.
    `computes` is false for a loader, whose modules are never asked anything.
    """

    # A configuration lists the layers of every model of the process, and through them its KV cache.
    opaque: Collection[type] = tuple(
        kind for kind in vars(vllm.config).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    )
    # What reads a checkpoint into a tensor; weights are never loaded anew where they are attached.
    unused: Collection[str] = ("weight_loader", "_weight_loader")

    def __init__(
        self,
        vllm_config: Any,
        model_config: Any,
        *,
        prefix: str,
        target: Target | None,
        target_rank: int | None = None,
        computes: bool = True,
    ) -> None:
        self._config = vllm_config
        self._model_config = model_config
        self._prefix = prefix
        self._target = target
        # vLLM 0.26 and 0.27 look at what post-processing leaves of experts right after loading them.
        self._needs_all = computes or model_config.is_moe
        self._layers: MutableMapping[torch.nn.Module, _Layers] = weakref.WeakKeyDictionary()
        self.role = role_of(vllm_config, model_config)
        self.rank = _rank(vllm_config.parallel_config) if target_rank is None else target_rank
        self._device = load_device(vllm_config)
        self.device = uuid_of(self._device)
        # Taken now: what builds a model also changes its configuration.
        self._facts = facts(vllm_config, model_config, device=self.device)

    @property
    def stages(self) -> tuple[Stage, ...]:
        # On a CPU post-processing ends in closures over packed weights, which no other process can have.
        return ("loaded",) if self.device == CPU else ("processed", "loaded")

    def facts(self, configs: Mapping[str, bytes]) -> Mapping[str, object]:
        return self._facts

    def skeleton(self, configs: Mapping[str, bytes]) -> torch.nn.Module:
        return self._built(torch.device("meta"))

    def load(self, stage: Stage, on_progress: Callable[[str], None]) -> Loaded:
        """Return what vLLM's default loader makes of the checkpoint, whose every byte was hashed before.

        TrustError naming the first file that is not as signed or pinned, or that changed until it was loaded;
        ConfigError for weights that are quantized while they are loaded, at a stage where they should not be.
        """
        if self._target is None:
            raise ConfigError("without a manifest an engine attaches, and loads nothing")
        identity, state = self._target.identity_of(self.role), self._target.manifest.directories.state
        began = time.monotonic()
        stats = verified_stats(identity, state, on_progress=telling("verifying", on_progress))
        configs = read_configs(identity.root, identity.manifest)
        verified = time.monotonic()
        on_progress("vLLM reads the weights")
        module = self._built(self._device)
        finish_later = quantizes_while_loading(module, stage)
        model_config = copy.copy(self._model_config)
        # vLLM was started on the configs alone; the weights are where they always were.
        model_config.model = str(identity.root)
        load_config = copy.copy(self._config.load_config)
        load_config.load_format, load_config.model_loader_extra_config = "safetensors", {}
        with set_default_torch_dtype(self._model_config.dtype), self._device, _without_leftovers(module):
            DefaultModelLoader(load_config).load_weights(module, model_config)
            if finish_later:
                finalize_layerwise_processing(module, model_config)
        if changed := check_stats(identity, stats):
            raise TrustError(f"checkpoint {identity.root}: {changed[0]} changed while it was loaded")
        if stage == "processed":
            self._process(module)
        flags = flags_of(module, self._built(torch.device("meta")), inner=stage == "processed", opaque=self.opaque)
        built = time.monotonic()
        phases = {"verify": verified - began, "build": built - verified, "load": built - began}
        return Loaded(module.eval(), configs, stats, phases, flags)

    def finish(self, module: torch.nn.Module, stage: Stage) -> torch.nn.Module:
        if stage == "processed":
            with self._where_it_computes():
                process_again(module, self._process, opaque=self.opaque)
        elif self._needs_all:
            process_loaded(module, self._process)
        return module.eval()

    def is_of(self, vllm_config: Any) -> bool:
        """Tell whether this is the source of the worker that has this configuration."""
        return self._config is vllm_config

    def claim(self, module: torch.nn.Module) -> None:
        """Have vLLM compute with this module, of all that were built here: it looks layers up by their names.

        Of the one that is served alone: what is claimed stays in memory, and so do the weights of its layers.
        """
        compilation, layers = self._config.compilation_config, self._layers[module]
        compilation.static_forward_context.update(layers.by_name)
        experts = compilation.static_all_moe_layers
        experts.extend(name for name in layers.experts if name not in experts)

    def _built(self, device: torch.device) -> torch.nn.Module:
        with contextlib.ExitStack() as stack:
            stack.enter_context(set_default_torch_dtype(self._model_config.dtype))
            stack.enter_context(device)
            if self.role == DRAFT:
                # A head on the target's states may lack embedding and output: vLLM gives it the target's afterwards.
                stack.enter_context(_Blank())
            if device.type == "meta":
                stack.enter_context(_readable_maps())
            layers = stack.enter_context(self._own_layers())
            module: torch.nn.Module = vllm_loading.initialize_model(
                vllm_config=self._config, model_config=self._model_config, prefix=self._prefix
            )
        self._layers[module] = layers
        return module

    @contextlib.contextmanager
    def _own_layers(self) -> Iterator["_Layers"]:
        """Let a model be built as if none was before; what it entered in the configuration is told at the end.

        Layers enter themselves there, by name, and every model of a process gets the same rotary tables, which
        computing changes.
        """
        compilation, tables = self._config.compilation_config, rotary_embedding._ROPE_DICT
        by_name, experts = compilation.static_forward_context, compilation.static_all_moe_layers
        before, experts_before, tables_before = dict(by_name), list(experts), dict(tables)
        by_name.clear()
        experts.clear()
        tables.clear()
        layers = _Layers()
        try:
            yield layers
        finally:
            layers.by_name.update(by_name)
            layers.experts.extend(experts)
            by_name.clear()
            by_name.update(before)
            experts[:] = experts_before
            tables.clear()
            tables.update(tables_before)

    @contextlib.contextmanager
    def _where_it_computes(self) -> Iterator[None]:
        with set_default_torch_dtype(self._model_config.dtype), self._device:
            yield

    def _process(self, module: torch.nn.Module) -> None:
        with self._where_it_computes():
            vllm_loading.process_weights_after_loading(module, self._model_config, self._device)


@contextlib.contextmanager
def _readable_maps() -> Iterator[None]:
    """Have a skeleton's maps of experts hold values: vLLM reads them while it builds a model, to log them.

    What an attached module gets is the shard's, as for any other tensor.
    """
    mapped = expert_map_manager.determine_expert_map

    def readable(*arguments: Any, **options: Any) -> Any:
        with torch.device(CPU):
            return mapped(*arguments, **options)

    expert_map_manager.determine_expert_map = readable
    try:
        yield
    finally:
        expert_map_manager.determine_expert_map = mapped


class _Blank(TorchFunctionMode):
    """Makes new memory zero: what a checkpoint does not fill is donated as well, and is to be the same each time."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function in (torch.empty, torch.empty_like, torch.empty_strided) else made


def role_of(vllm_config: Any, model_config: Any) -> str:
    """Return which of an engine's models this is."""
    speculative = vllm_config.speculative_config
    # Where the draft comes from the text alone, it is said to be the target's.
    if speculative is None or speculative.draft_model_config is speculative.target_model_config:
        return TARGET
    is_draft = model_config is speculative.draft_model_config or model_config.runner_type == "draft"
    return DRAFT if is_draft else TARGET


def _rank(parallel_config: Any) -> int:
    """Return this worker's place among all ranks of the model, replicas included, as vLLM numbers them."""
    # The rank of a dense replica is 0 in each; its index is not.
    replica = getattr(parallel_config, "data_parallel_index", None)
    if replica is None:
        replica = parallel_config.data_parallel_rank
    per_replica = parallel_config.tensor_parallel_size * parallel_config.pipeline_parallel_size
    return int(replica * per_replica + parallel_config.rank % per_replica)


def load_device(vllm_config: Any) -> torch.device:
    """Return where vLLM wants this worker's weights."""
    chosen = vllm_config.load_config.device
    return torch.device(vllm_config.device_config.device if chosen is None else chosen)


def uuid_of(device: torch.device) -> str:
    """Return `cpu`, or the UUID of a GPU or part of one."""
    if device.type == CPU:
        return CPU
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else visible_device(uuid, os.environ)


@contextlib.contextmanager
def _without_leftovers(module: torch.nn.Module) -> Iterator[None]:
    """Take from a module what reading left of its own and emptied: a model that was attached never had it."""
    before = {part: set(vars(part)) for part in module.modules()}
    yield
    for part, names in before.items():
        for name in vars(part).keys() - names:
            if isinstance(left := vars(part)[name], dict | list | set) and not left:
                delattr(part, name)
