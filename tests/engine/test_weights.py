"""Attach or donate, against a real keeper process that a real loader has filled."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from appliance.engine import disk
from appliance.engine.weights import obtain
from appliance.errors import ApplianceError, MissError, ResourceError, TrustError
from appliance.handover.weights import Weights
from appliance.tensors.comparison import differences
from appliance.verdict import Outcome
from tests.sites import Site

NAME = "engine@m"


@pytest.fixture
def site(tmp_path: Path, checkpoint: Path) -> Site:
    return Site(tmp_path, checkpoint)


@pytest.fixture
def kept(site: Site) -> Iterator[Site]:
    with site.keeper():
        yield site


def attached(site: Site) -> Weights:
    return obtain(site.target(), client_name=NAME)


def close(weights: Weights) -> None:
    if weights.client is not None:
        weights.client.close()


def refusals(site: Site) -> list[str]:
    return [verdict["reason"] for verdict in site.status()["verdicts"] if verdict["verdict"] == "refused"]


def test_an_attached_model_equals_the_one_loaded_from_disk_bit_for_bit(kept: Site) -> None:
    weights = attached(kept)
    try:
        assert weights.verdict.outcome is Outcome.HIT
        assert differences(disk.load_verified(kept.target()).module, weights.module, values=False) == []
    finally:
        close(weights)


def test_an_attached_engine_is_shown_until_it_closes_its_lease(kept: Site) -> None:
    weights = attached(kept)
    leases = kept.status()["leases"]
    assert [(lease["client"], lease["pid"], lease["verdict"]) for lease in leases] == [(NAME, os.getpid(), "hit")]
    assert leases[0]["phases_s"].keys() >= {"wait", "check", "config", "skeleton", "attach"}
    close(weights)
    deadline = time.monotonic() + 10
    while kept.status()["leases"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kept.status()["leases"] == []


def test_changed_values_under_the_same_headers_are_refused_by_file_name(kept: Site) -> None:
    file = kept.zero("model.norm.weight")
    with pytest.raises(TrustError, match=file.name):
        attached(kept)
    assert refusals(kept) == ["file_differs"]


def test_changed_values_are_seen_with_verify_full_even_under_an_old_stat(kept: Site) -> None:
    file = kept.zero("model.norm.weight")
    kept.write(verify="full")
    with pytest.raises(TrustError, match=file.name):
        attached(kept)


def test_verify_signature_looks_at_no_other_file(kept: Site) -> None:
    kept.zero("model.norm.weight")
    kept.write(verify="signature")
    weights = attached(kept)
    close(weights)
    assert weights.verdict.outcome is Outcome.HIT


def test_a_file_that_was_only_touched_is_hashed_and_accepted(kept: Site) -> None:
    for file in kept.checkpoint.iterdir():
        os.utime(file)
    weights = attached(kept)
    close(weights)
    assert weights.verdict.outcome is Outcome.HIT


def test_a_missing_file_is_refused_by_name(kept: Site) -> None:
    next(kept.checkpoint.glob("*.safetensors")).unlink()
    with pytest.raises(TrustError, match=r"model\.safetensors"):
        attached(kept)


def test_a_newly_signed_checkpoint_does_not_get_the_old_weights(kept: Site) -> None:
    kept.zero("model.norm.weight")
    kept.sign()
    with pytest.raises(MissError, match="root_digest: wanted"):
        attached(kept)
    assert refusals(kept) == ["fingerprint_differs"]


def test_another_setting_in_the_manifest_is_refused_and_named_with_both_values(kept: Site) -> None:
    kept.write(dtype="bfloat16")
    with pytest.raises(MissError, match=r"setting\.dtype: wanted bfloat16, held auto") as caught:
        attached(kept)
    assert caught.value.exit_status == 69
    assert "weights@m" in str(caught.value)


def test_evicted_weights_are_a_miss_that_names_the_cause(kept: Site) -> None:
    with kept.client() as client:
        assert client.evict(force=False) > 0
    kept.write(wait=0)
    with pytest.raises(MissError, match="evicted"):
        attached(kept)


def test_on_miss_load_reads_from_disk_and_donates(kept: Site) -> None:
    expected = disk.load_verified(kept.target()).module
    with kept.client() as client:
        client.evict(force=False)
    kept.write(on_miss="load")
    weights = attached(kept)
    try:
        assert weights.verdict.outcome is Outcome.DONATED
        # What the engine measured before is not overwritten.
        assert not weights.phases_s.keys() & {"interpreter", "identity", "imports"}
        assert differences(expected, weights.module, values=False) == []
        assert kept.status()["state"] == "resident"
        second = attached(kept)
        close(second)
        assert second.verdict.outcome is Outcome.HIT
    finally:
        close(weights)


def test_on_miss_load_never_makes_a_second_copy_beside_weights_of_another_target(kept: Site) -> None:
    kept.write(on_miss="load", dtype="bfloat16")
    before = kept.status()["size_bytes"]
    with pytest.raises(MissError, match="holds other weights"):
        attached(kept)
    assert kept.status()["size_bytes"] == before


def test_mode_copy_leaves_nothing_that_the_keeper_must_hold_for_it(kept: Site) -> None:
    expected = disk.load_verified(kept.target()).module
    kept.write(mode="copy")
    weights = attached(kept)
    assert weights.client is None
    with kept.client() as client:
        assert client.evict(force=False) == weights.record.size_bytes
    assert differences(expected, weights.module, values=False) == []
    with torch.no_grad():  # a private clone may be written
        next(weights.module.parameters()).zero_()


def test_without_a_keeper_the_engine_says_so_and_loads_nothing(site: Site) -> None:
    site.write(wait=0, on_miss="load")
    with pytest.raises(ResourceError, match="no keeper answers"):
        attached(site)


def test_the_weights_stay_usable_when_the_keeper_is_killed(site: Site) -> None:
    with site.keeper() as keeper:
        weights = attached(site)
        expected = [parameter.clone() for parameter in weights.module.parameters()]
        keeper.kill()
        keeper.wait()
    assert all(map(torch.equal, weights.module.parameters(), expected))
    close(weights)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b"{", "not JSON"),
        ("config.json", b'{"model_type": "no-such-thing"}', "unknown to transformers"),
        ("model.safetensors", b"\xff" * 64, "announces a header"),
        ("model.safetensors", b"short", "too few"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "gone.safetensors"}}', "not in the checkpoint"),
    ],
)
def test_a_signed_but_broken_checkpoint_is_one_clear_line(site: Site, name: str, content: bytes, says: str) -> None:
    (site.checkpoint / name).write_bytes(content)
    site.sign()
    with pytest.raises(ApplianceError, match=says):
        disk.load_verified(site.target())
