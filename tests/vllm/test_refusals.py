"""What would write to attached weights is refused before anything is mapped."""

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import ConfigError
from appliance.vllm.refusals import refuse_writers


def config(*, sleep: bool = False, transfer: object = None) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleep), weight_transfer_config=transfer)


def test_an_engine_that_only_reads_its_weights_is_not_refused() -> None:
    refuse_writers(config())


def test_an_older_vllm_that_knows_of_no_weight_transfer_is_not_refused() -> None:
    refuse_writers(SimpleNamespace(model_config=SimpleNamespace()))


def test_sleep_mode_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match="--enable-sleep-mode") as caught:
        refuse_writers(config(sleep=True))
    assert "stop the engine" in str(caught.value)


def test_weight_transfer_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match="--weight-transfer-config") as caught:
        refuse_writers(config(transfer=object()))
    assert "sign it" in str(caught.value)
