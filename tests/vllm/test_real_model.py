"""A real model through everything that runs in production: keeper, loader process, `vllm serve`, an OpenAI client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.errors import EXIT_TRUST
from tests.service_manager import ServiceManager
from tests.sites import MODEL
from tests.vllm.site import VllmSite

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as manager:
        yield manager


@pytest.fixture
def site(tmp_path: Path, model_checkpoint: Path) -> VllmSite:
    return VllmSite(tmp_path / "site", model_checkpoint)


def answer(site: VllmSite) -> tuple[str | None, list[int]]:
    """Return what it says to QUESTION, and the tokens of that."""
    base = f"http://127.0.0.1:{site.port}/v1"
    with openai.OpenAI(base_url=base, api_key="-", max_retries=0, timeout=120) as client:
        said: Any = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, extra_body={"return_token_ids": True}
        )
    return said.choices[0].message.content, said.choices[0].token_ids


def test_weights_outlive_engines_and_keepers_and_no_other_bytes_are_served(
    site: VllmSite, manager: ServiceManager
) -> None:
    with site.kept(manager) as keeper:
        site.wait_until_resident()
        with site.engine() as engine:
            assert "weights: hit (loaded, 1 ranks)" in engine.wait_for_line("weights:")
            first = answer(site)
            assert first[0] == ANSWER
            keeper.kill()
            engine.wait_for_line("the keeper is gone")
            assert answer(site) == first
            with site.kept(manager):
                engine.wait_for_line("lease renewed")
                assert answer(site) == first
                assert engine.stop() == 0, engine.said
                # Same shapes, same headers, same size and names: other values.
                with site.engine() as again:
                    assert "weights: hit" in again.wait_for_line("weights:")
                    assert answer(site) == first
                    changed = site.zero("model.norm.weight")
                    # Who runs goes on with what it has mapped.
                    assert answer(site) == first
                    assert again.stop() == 0, again.said
                with site.engine() as refused:
                    status, said = refused.ended()
                assert (status, changed.name in said) == (EXIT_TRUST, True), said
    before = site.target().identity.root_digest
    site.sign()
    assert site.target().identity.root_digest != before
    with site.kept(manager):
        site.wait_until_resident()
