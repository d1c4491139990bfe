"""What of vLLM's post-processing is done to weights that are mapped, and what it may write to."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from appliance.errors import ConfigError
from appliance.tensors.comparison import differences
from appliance.tensors.flags import flags_of, set_flags
from appliance.tensors.inventory import TensorError
from appliance.vllm.processing import process_again, process_loaded, quantizes_while_loading
from tests.tensors.shards import Shard


class Mode:
    """vLLM's switch for weights that are processed already."""

    on = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.on = True
        yield
        self.on = False


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Mode:
    """Have the import of vLLM's switch find one, as since 0.30."""
    mode = Mode()
    utils = ModuleType("vllm.model_executor.utils")
    vars(utils)["weights_already_processed"] = mode.entered
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    return mode


def module_of(*methods: object) -> nn.Module:
    """Return a module of one linear layer for each quantization method."""
    layers = [nn.Linear(2, 2) for _ in methods]
    for layer, method in zip(layers, methods, strict=True):
        vars(layer)["quant_method"] = method
    return nn.Sequential(*layers)


def method(*, supports: bool) -> SimpleNamespace:
    return SimpleNamespace(supports_pre_processed_weights=supports)


def test_what_every_method_can_rebuild_is_rebuilt_in_vllms_own_mode(mode: Mode) -> None:
    asked = []
    # As of a layer whose method is none of vLLM's: it asks that of nothing.
    process_again(module_of(method(supports=True), object()), lambda module: asked.append(mode.on))
    assert asked == [True]


def test_nothing_is_rebuilt_where_one_method_cannot(mode: Mode) -> None:
    process_again(module_of(method(supports=True), method(supports=False)), never)


class AutoAWQMoEMethod:
    """One of vLLM's methods that make the kernel of experts anew, but do not know of processed weights."""

    supports_pre_processed_weights = False

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self.kernel: tuple[torch.Tensor, bool] | None = None

    def _setup_kernel(self, layer: Any) -> None:
        self.kernel = layer.weight, self._mode.on


def test_the_kernel_of_experts_is_made_anew_where_their_method_makes_nothing_else(mode: Mode) -> None:
    experts = AutoAWQMoEMethod(mode)
    module = module_of(method(supports=False), experts)
    process_again(module, never)
    assert experts.kernel == (module.get_submodule("1").weight, True)


class ModelOptNvFp4FusedMoE:
    """One that says it knows of processed weights, and breaks off at those of any other kernel than one."""

    supports_pre_processed_weights = True
    moe, experts_cls = "facts", "experts"

    def __init__(self, backend: str) -> None:
        self.nvfp4_backend = SimpleNamespace(name=backend)
        self.moe_kernel: dict[str, object] | None = None

    def get_fused_moe_quant_config(self, layer: Any) -> object:
        return layer.weight

    def process_weights_after_loading(self, layer: Any) -> None:
        raise AssertionError("written to where it lies")

    _build_moe_kernel = process_weights_after_loading


def make_nvfp4_moe_kernel(**facts: object) -> dict[str, object]:
    """Return what vLLM would make a kernel of; found in the module of its method, as vLLM's is."""
    return facts


@pytest.mark.parametrize(("backend", "by_itself"), [("MARLIN", False), ("FLASHINFER_TRTLLM", True)])
def test_a_method_that_would_break_off_is_not_asked(mode: Mode, backend: str, *, by_itself: bool) -> None:
    experts = ModelOptNvFp4FusedMoE(backend)
    module = module_of(method(supports=True), experts)
    layer: Any = module.get_submodule("1")
    vars(layer)["_expert_routing_tables"] = lambda: None
    asked: list[nn.Module] = []
    process_again(module, asked.append)
    assert asked == [module][: int(by_itself)]
    made = {"moe_quant_config": layer.weight, "moe_config": "facts", "experts_cls": "experts"}
    made |= {"routing_tables": None, "backend": experts.nvfp4_backend}
    assert experts.moe_kernel == (None if by_itself else made)


def test_nothing_is_rebuilt_by_a_vllm_without_that_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    process_again(module_of(method(supports=True)), never)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("MXFP4: only for another backend"),
        AttributeError("only for another backend"),
        AssertionError("only for another backend"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_method_that_breaks_off_leaves_the_next_stage_to_be_tried(mode: Mode, error: Exception) -> None:
    def process(module: nn.Module) -> None:
        raise error

    with pytest.raises(TensorError, match="only for another backend"):
        process_again(module_of(method(supports=True)), process)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError, MemoryError, ConfigError])
def test_a_machine_that_fails_is_not_taken_for_such_a_method(mode: Mode, kind: Any) -> None:
    error = kind.__new__(kind)

    def process(module: nn.Module) -> None:
        raise error

    with pytest.raises(kind):
        process_again(module_of(method(supports=True)), process)


class UnquantizedMethod:
    """One of those that vLLM has for layers that are not quantized; of experts it names the kernel's backend."""

    def __init__(self, backend: str | None = None) -> None:
        if backend is not None:
            self.unquantized_backend = SimpleNamespace(name=backend)


@pytest.mark.parametrize(
    ("method", "is_own"),
    [
        (None, False),
        (UnquantizedMethod(), False),
        (UnquantizedMethod("TRITON"), False),
        (UnquantizedMethod("FLASHINFER_TRTLLM"), True),
        (SimpleNamespace(), True),
    ],
    ids=["none", "linear", "experts", "experts rewritten", "quantized"],
)
def test_what_a_method_may_write_to_is_copied_before_and_nothing_else(method: object, is_own: bool) -> None:
    module = module_of(method)
    mapped = {parameter.data_ptr() for parameter in module.parameters()}
    found: set[int] = set()
    process_loaded(module, lambda module: found.update(parameter.data_ptr() for parameter in module.parameters()))
    assert mapped.isdisjoint(found) == is_own


def replace_parameter(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """Do as vLLM 0.33 does: write to where the old one lies if it can, unless that is let go of."""
    old, attributes = getattr(layer, name), dict(vars(tensor))
    if getattr(old, "requantization_source", False):
        old = nn.Parameter(tensor.detach(), requires_grad=False)
        setattr(layer, name, old)
    else:
        old.data.copy_(tensor.data)
    for attribute, value in attributes.items():
        setattr(old, attribute, value)


def test_what_is_laid_out_anew_is_not_written_to_where_it_lies() -> None:
    module = module_of(UnquantizedMethod("CPU"), UnquantizedMethod("CPU"))
    anew, as_it_is = module.children()
    mapped = anew.get_parameter("weight"), as_it_is.get_parameter("weight")
    before = [weight.detach().clone() for weight in mapped]

    def process(module: nn.Module) -> None:
        replace_parameter(anew, "weight", mapped[0].detach() * 2)
        replace_parameter(as_it_is, "weight", mapped[1])

    process_loaded(module, process)
    assert all(map(torch.equal, mapped, before)), "written to"
    assert torch.equal(anew.get_parameter("weight"), before[0] * 2)
    assert as_it_is.get_parameter("weight").data_ptr() == mapped[1].data_ptr(), "copied in vain"
    assert not any(hasattr(weight, "requantization_source") for weight in (*mapped, *module.parameters()))


def test_what_is_copied_is_written_to_and_stays_the_parameter_that_its_method_knows() -> None:
    module = module_of(SimpleNamespace())
    (layer,) = module.children()
    weight = layer.get_parameter("weight")
    process_loaded(module, lambda module: replace_parameter(layer, "weight", weight.detach() * 2))
    assert layer.get_parameter("weight") is weight


def test_a_parameter_that_vllm_lets_go_of_itself_stays_one() -> None:
    module = module_of(UnquantizedMethod())
    weight = next(module.parameters())
    vars(weight)["requantization_source"] = True
    process_loaded(module, lambda module: None)
    assert vars(weight)["requantization_source"]


def test_weights_that_are_quantized_while_they_are_loaded_are_taken_as_processed_alone() -> None:
    module = module_of(SimpleNamespace(uses_meta_device=False), SimpleNamespace(uses_meta_device=True))
    assert quantizes_while_loading(module, "processed")
    with pytest.raises(ConfigError, match="quantize the checkpoint") as caught:
        quantizes_while_loading(module, "loaded")
    assert not isinstance(caught.value, TensorError), "no further stage is to be tried"
    assert not quantizes_while_loading(module_of(SimpleNamespace(uses_meta_device=False)), "loaded")


class LatentAttention(nn.Module):
    """Makes one parameter of another, and as vLLM does, in place where it has made it before."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.own = nn.Parameter(torch.ones(2), requires_grad=False)
        self.ready = False

    def process_weights_after_loading(self) -> None:
        made, last = self.weight * 2, getattr(self, "W_UV", None)
        if last is not None and last.shape == made.shape:
            last.copy_(made)
        else:
            self.W_UV = nn.Parameter(made, requires_grad=False)
        self.ready = True


@pytest.mark.parametrize(
    "lose",
    [
        lambda layer: setattr(layer, "pair", None),
        lambda layer: setattr(layer, "pair", ()),
        lambda layer: layer.scales.clear(),
    ],
    ids=["no tuple", "a shorter tuple", "a shorter list"],
)
def test_a_tensor_whose_place_is_gone_leaves_the_next_stage_to_be_tried(
    mode: Mode, lose: Callable[[Any], None]
) -> None:
    module = module_of(method(supports=True))
    layer: Any = module.get_submodule("0")
    layer.pair, layer.scales = (torch.ones(1), 2), [torch.ones(1)]
    with pytest.raises(TensorError, match="once more"):
        process_again(module, lambda module: lose(layer))


def test_what_attention_derives_is_not_written_to_where_it_lies(mode: Mode) -> None:
    attention = LatentAttention(torch.ones(2))
    attention.process_weights_after_loading()
    mapped, own = attention.W_UV, attention.own
    version = mapped._version
    attention.ready = False
    process_again(attention, lambda module: attention.process_weights_after_loading())
    assert mapped._version == version, "written to"
    assert (attention.ready, attention.W_UV is mapped, attention.own is own) == (True, True, True)
    assert [name for name, _ in attention.named_parameters()] == ["weight", "own", "W_UV"]


class Kernel:
    def __init__(self) -> None:
        self.width: int | None = None


class Quantized(nn.Module):
    """A layer as vLLM has them in fp8: its kernel notes the width of a weight; its scale moves in the other mode."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, device=device), requires_grad=False)
        self.weight.weight_loader = never  # type: ignore[attr-defined]
        self.scale = torch.ones(1, device=device)
        self.quant_method = SimpleNamespace(supports_pre_processed_weights=True, kernel=Kernel())

    def process(self, *, again: bool) -> None:
        if again:
            self.scale = self.scale.double()
            return
        loader = self.weight.weight_loader  # type: ignore[attr-defined]
        self.weight = nn.Parameter(self.weight.data.t(), requires_grad=False)
        self.weight.weight_loader = loader  # type: ignore[attr-defined]
        kernel = self.quant_method.kernel
        kernel.width = self.weight.shape[1]
        self.warmed_up = kernel


def test_what_a_kernel_notes_beside_its_weight_comes_along(mode: Mode) -> None:
    loaded, attached = Quantized("cpu"), Quantized("meta")
    loaded.process(again=False)
    flags = flags_of(loaded, Quantized("meta"), inner=True)
    made = Shard(loaded)
    for module in (loaded, attached):
        made.attach(module, stage="processed")
    made.close()
    del attached.weight.__dict__["weight_loader"]  # vLLM's parameters of another class lose it there
    set_flags(attached, flags)
    process_again(attached, lambda module: attached.process(again=mode.on))
    assert not differences(loaded, attached, unused=("weight_loader",))
    assert attached.warmed_up is attached.quant_method.kernel
    assert differences(loaded, attached) == ["weight: only in the first"]


def never(module: nn.Module) -> None:
    raise AssertionError("processed")
