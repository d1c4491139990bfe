"""What would write to attached weights, or move them, is refused before anything is mapped."""

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import ConfigError
from appliance.vllm.refusals import refuse_movers, refuse_other_loaders


def config(
    *, sleep: bool = False, transfer: object = None, balanced: bool = False, offload_gb: float = 0, group_size: int = 0
) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleep),
        parallel_config=SimpleNamespace(enable_eplb=balanced),
        weight_transfer_config=transfer,
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=offload_gb), prefetch=SimpleNamespace(offload_group_size=group_size)
        ),
    )


def test_an_engine_that_only_reads_its_weights_is_not_refused() -> None:
    refuse_movers(config())


def test_an_older_vllm_that_knows_nothing_of_these_is_not_refused() -> None:
    refuse_movers(SimpleNamespace(model_config=SimpleNamespace(), parallel_config=SimpleNamespace()))


@pytest.mark.parametrize(
    ("settings", "option", "instead"),
    [
        ({"sleep": True}, "--enable-sleep-mode", "stop the engine"),
        ({"transfer": object()}, "--weight-transfer-config", "sign it"),
        ({"balanced": True}, "--enable-eplb", "--expert-placement-strategy"),
        ({"offload_gb": 0.5}, "--cpu-offload-gb", "more GPUs"),
        ({"group_size": 8}, "--offload-group-size", "more GPUs"),
    ],
)
def test_what_moves_weights_is_refused_with_what_to_do_instead(
    settings: dict[str, Any], option: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        refuse_movers(config(**settings))
    assert instead in str(caught.value)


def test_a_format_that_vllm_has_put_in_place_of_ours_is_refused() -> None:
    refuse_other_loaders(SimpleNamespace(load_config=SimpleNamespace(load_format="appliance")))
    with pytest.raises(ConfigError, match="`bitsandbytes`"):
        refuse_other_loaders(SimpleNamespace(load_config=SimpleNamespace(load_format="bitsandbytes")))
