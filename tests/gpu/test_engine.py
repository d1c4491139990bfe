"""The built-in engine on a real GPU: what is true of it on a CPU is true here, and it says the same from disk."""

import gc
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.safetensors import TensorInfo
from appliance.descriptors import Descriptor
from appliance.engine import disk
from appliance.engine.__main__ import _language_model
from appliance.engine.answer import Piece, Sampling
from appliance.engine.model import load, skeleton
from appliance.engine.weights import obtain
from appliance.handover.weights import Weights
from appliance.slabs.cuda import CudaBackend
from appliance.tensors.attachment import attach
from appliance.tensors.packing import pack
from appliance.tensors.staging import read_to_device
from tests import gpu_process
from tests.engine import test_weights
from tests.engine.checkpoints import ARCHITECTURES, make_checkpoint, quiet
from tests.gpu_site import GpuSite
from tests.sites import MODEL, Site

GPU = torch.device("cuda", 0)
PROMPT = "The weights stay while"
SAMPLING = Sampling(max_tokens=32, temperature=0.0)

# Every one of them, with the fixtures below.
globals().update({name: test for name, test in vars(test_weights).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def site(tmp_path: Path, checkpoint: Path, uuid: str) -> Iterator[Site]:
    with gpu_process.gpus((uuid,), fake=False):
        yield GpuSite(tmp_path, checkpoint, uuid, fake=False)
        gc.collect()


@pytest.fixture
def kept(site: Site) -> Iterator[Site]:
    with site.keeper():
        yield site


def greedy(weights: Weights) -> list[int]:
    model = _language_model(weights)
    pieces: list[Piece] = []
    model.generate(model.tokenizer.encode(PROMPT), SAMPLING, emit=pieces.append, cancelled=threading.Event())
    return [token for piece in pieces for token in piece.token_ids]


def test_greedy_tokens_of_attached_weights_are_those_of_weights_from_disk(kept: Site) -> None:
    attached = obtain(kept.target(), client_name="engine@m")
    tokens = greedy(attached)
    assert all(tensor.is_cuda for tensor in attached.module.parameters())
    with kept.client() as client:
        client.evict(force=True)
    kept.write(on_miss="load")
    donated = obtain(kept.target(), client_name="engine@m")
    assert (str(attached.verdict), str(donated.verdict)) == ("hit", "donated")
    assert greedy(donated) == tokens
    with quiet():
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(kept.checkpoint, dtype="auto").to(GPU)
    prompt = torch.tensor([_language_model(attached).tokenizer.encode(PROMPT)], device=GPU)
    said = theirs.generate(prompt, max_new_tokens=32, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert tokens == said[0, prompt.shape[1] :].tolist()
    assert len(set(tokens)) > 10
    for weights in (attached, donated):
        assert weights.client is not None
        weights.client.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_says_the_same_from_disk_and_attached(tmp_path: Path, architecture: str, uuid: str) -> None:
    if ARCHITECTURES[architecture][0] not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know it")
    backend = CudaBackend(uuid)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", architecture=architecture, dtype=torch.bfloat16)
    prompt = torch.arange(3, 19, device=GPU)[None]
    with quiet(), torch.inference_mode():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").to(GPU).eval()
        expected = theirs(prompt).logits.clone()
    tensors: dict[str, torch.Tensor] = {}

    def allocate(info: TensorInfo) -> torch.Tensor:
        tensors[info.name] = torch.empty(info.shape, dtype=disk.DTYPES[info.dtype], device=GPU)
        return tensors[info.name]

    read_to_device(checkpoint, digest_checkpoint(checkpoint), device=GPU, allocate=allocate)
    module = load(checkpoint, tensors, dtype="auto").to(GPU)
    with torch.inference_mode():
        assert torch.equal(module(prompt).logits, expected)
    packed = pack(module, backend)
    mappings = [backend.map(slab, size) for slab, size in zip(packed.slabs, packed.layout.slab_sizes, strict=True)]
    attached = skeleton(checkpoint, dtype="auto")
    attach(attached, packed.layout, mappings)
    for mapping in mappings:
        mapping.close()
    packed.close()
    with torch.inference_mode():
        assert torch.equal(attached(prompt).logits, expected)
    del theirs, module, attached
    gc.collect()


def test_a_scrub_finds_one_flipped_bit_in_resident_weights(kept: Site, uuid: str) -> None:
    intact = kept.call("scrub", MODEL, "--json")
    assert intact.returncode == 0, intact.stderr
    with kept.client() as client:
        described = client.describe(role="target", rank=0, wait_s=0)
        described.configs.close()
        record = described.record
        [slab] = client.attach(role="target", rank=0, client="flip", fingerprint=record.fingerprint)
        with slab:
            _flip(CudaBackend(uuid), slab, record.slab_sizes[0])
    damaged = kept.call("scrub", MODEL)
    assert damaged.returncode == 77, damaged.stderr
    assert "target rank 0: slab 0" in damaged.stderr
    [shard] = kept.status()["shards"]
    assert shard["scrub"]["damaged"] == [0]


def _flip(backend: CudaBackend, slab: Descriptor, size_bytes: int) -> None:
    """Change one bit, as whoever holds a descriptor of device memory can."""
    gpu = backend.gpu
    handle = gpu.import_handle(slab.fileno())
    address = gpu.reserve(size_bytes)
    gpu.map(address, size_bytes, handle)
    gpu.release(handle)
    gpu.allow(address, size_bytes, writable=True)
    window = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
    memory = torch.as_tensor(type("Window", (), {"__cuda_array_interface__": window})(), device=GPU)
    memory[4096] ^= 4
    gpu.synchronize()
    del memory
    gpu.unmap(address, size_bytes)
    gpu.free(address, size_bytes)


def test_the_status_says_who_holds_the_gpus_memory(kept: Site, uuid: str) -> None:
    weights = obtain(kept.target(), client_name="engine@m")
    done = kept.call("status", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gpu = next(gpu for gpu in found["gpus"] if gpu["uuid"] == uuid)
    assert gpu["kept_bytes"] == {MODEL: weights.record.size_bytes}
    assert gpu["engines"] or gpu["strangers"]  # in a PID namespace nobody can tell which is which
    evicted = kept.call("evict", MODEL)
    assert evicted.returncode == 75
    assert "engine@m" in evicted.stderr
    assert weights.client is not None
    weights.client.close()
    assert kept.call("evict", MODEL).returncode == 0


def test_the_engine_serves_from_a_gpu(kept: Site) -> None:
    argv = [kept.python, "-m", "appliance.engine", "--manifest", str(kept.manifest), "--model", MODEL]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=kept.environment)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "weights: hit" in line:
            break
    process.terminate()
    process.communicate(timeout=60)
    assert "weights: hit" in said[-1], "".join(said)
