"""The built-in engine on a GPU in host memory; tests/gpu runs all of test_weights.py on a real one."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from appliance.checkpoint.safetensors import TensorInfo
from appliance.engine import disk
from appliance.engine.weights import obtain
from appliance.errors import MissError, ResourceError
from appliance.tensors.comparison import differences
from appliance.verdict import Outcome
from tests import gpu_process
from tests.gpu_site import GpuSite
from tests.sites import MODEL, WAIT_S

UUID = "GPU-00000000-0000-0000-0000-0000000000a0"
META = torch.device("meta")  # stands in for one that is not the host's memory
OTHER_UUID = "GPU-00000000-0000-0000-0000-0000000000b1"


@pytest.fixture
def kept(tmp_path: Path, checkpoint: Path) -> Iterator[GpuSite]:
    site = GpuSite(tmp_path, checkpoint, UUID, fake=True)
    with gpu_process.gpus((UUID, OTHER_UUID), fake=True), site.keeper():
        yield site
        gc.collect()


def test_weights_loaded_to_a_gpu_are_attached_there_scrubbed_and_loaded_again(kept: GpuSite) -> None:
    weights = obtain(kept.target(), client_name="engine@m")
    assert weights.verdict.outcome is Outcome.HIT
    assert (weights.record.device, len(weights.record.checksums)) == (UUID, len(weights.record.slab_sizes))
    assert differences(disk.load_verified(kept.target()).module, weights.module, values=False) == []
    assert weights.client is not None
    weights.client.close()
    del weights
    done = kept.call("scrub", MODEL, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(shard["device"], shard["damaged"]) for shard in found["shards"]] == [(UUID, [])]
    with kept.client() as client:
        client.evict(force=False)
    kept.write(on_miss="load")
    weights = obtain(kept.target(), client_name="engine@m")
    assert weights.verdict.outcome is Outcome.DONATED
    assert differences(disk.load_verified(kept.target()).module, weights.module, values=False) == []
    assert weights.client is not None
    weights.client.close()


def test_another_gpu_another_model_and_another_capability_are_refused_by_name(
    kept: GpuSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    from appliance.engine import weights as module

    facts = {"device.kind": "cuda", "device.model": "NVIDIA H100", "device.capability": "8.9"}
    monkeypatch.setattr(module, "device_facts", lambda device: facts)
    with pytest.raises(MissError) as caught:
        obtain(kept.target(), client_name="engine@m")
    assert "device.capability: wanted 8.9, held 9.0" in str(caught.value)
    assert "device.model: wanted NVIDIA H100, held NVIDIA H200" in str(caught.value)
    kept.write(gpus=[OTHER_UUID])
    with pytest.raises(MissError, match=f"gpus: wanted {OTHER_UUID}, held {UUID}"):
        obtain(kept.target(), client_name="engine@m")


def test_memory_that_the_driver_does_not_know_any_more_is_an_error_and_loaded_again(kept: GpuSite) -> None:
    with kept.client() as client:
        described = client.describe(role="target", rank=0, wait_s=0)
        described.configs.close()
    before = described.record.shard_id
    with gpu_process.gpus((UUID,), fake=True, boot="1"):
        with pytest.raises(ResourceError, match="cannot be mapped") as caught:
            obtain(kept.target(), client_name="engine@m")
        assert "driver restarted? weights@m loads the weights again" in str(caught.value.hint)
    with kept.client() as client:
        described = client.describe(role="target", rank=0, wait_s=WAIT_S)
        described.configs.close()
        assert described.record.shard_id != before
        assert [one["reason"] for one in client.status()["verdicts"] if one["reason"]] == ["stale_memory"]


def test_what_one_process_cannot_map_is_kept_while_others_have_it(kept: GpuSite) -> None:
    weights = obtain(kept.target(), client_name="engine@m")
    with gpu_process.gpus((UUID,), fake=True, boot="1"), pytest.raises(ResourceError, match="cannot be mapped"):
        obtain(kept.target(), client_name="other")
    assert kept.status()["state"] == "resident"
    assert kept.status()["shards"][0]["shard_id"] == weights.record.shard_id
    assert weights.client is not None
    weights.client.close()


def test_what_shrinks_in_the_model_is_converted_before_it_goes_to_the_gpu(kept: GpuSite) -> None:
    kept.write(dtype="bfloat16")
    expected = disk.load_verified(kept.target()).module
    memory = disk._Memory(kept.target(), kept.folder)
    memory.settle({"config.json": (kept.checkpoint / "config.json").read_bytes()})
    memory.device = META
    wide = TensorInfo("wide", "F32", (4,), 0, 16)
    narrow = TensorInfo("narrow", "BF16", (4,), 0, 8)
    whole = TensorInfo("whole", "I64", (4,), 0, 32)
    assert [memory.allocate(info).is_meta for info in (wide, narrow, whole)] == [False, True, True]
    assert {parameter.dtype for parameter in expected.parameters()} == {torch.bfloat16}
