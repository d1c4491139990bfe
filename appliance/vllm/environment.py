"""The environment of every process of vLLM: whose weights, which GPUs, and where what it compiles is kept.

Caches lie below CACHE/MODEL/vllm/KEY, where KEY follows from the target, the checkpoint's content apart: an engine that
restarts finds all of them, and so does one on a new checkpoint of the same kind; another vLLM or layout finds none.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from appliance.errors import HostError
from appliance.fingerprint import ROOT_DIGEST
from appliance.manifest.shaping import NAMES_VARIABLE, shaping_variables
from appliance.slabs.devices import CPU
from appliance.target import Target, devices
from appliance.vllm.assignment import MANIFEST_VARIABLE, MODEL_VARIABLE
from appliance.vllm.plugin import LOAD_FORMAT

KEPT_CACHES = 3
# Where each of these keeps what it compiled or tuned.
_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "config",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep-gemm",
    "XDG_CACHE_HOME": "other",
}
_CONTENT = frozenset({ROOT_DIGEST, "setting.revision", "draft.root_digest"})
# Nothing is fetched and nothing reported: a checkpoint is all there on this host, or it is not served.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}


def environment(target: Target, manifest: Path) -> dict[str, str]:
    """Return the variables; the manifest's own `engine.environment` goes before all but the last ones."""
    engine = target.model.engine
    folder = cache_folder(target)
    own = [device for device in devices(target.model) if device != CPU]
    found = {
        **_OFFLINE,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        **{variable: str(folder / name) for variable, name in _CACHES.items()},
        **engine.thread_environment,
        **engine.environment,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(own),
        MANIFEST_VARIABLE: str(manifest.absolute()),
        MODEL_VARIABLE: target.name,
    }
    if (plugins := {**os.environ, **engine.environment}.get("VLLM_PLUGINS")) is not None:
        # A list of the only ones to be loaded.
        found["VLLM_PLUGINS"] = ",".join([*filter(None, plugins.split(",")), LOAD_FORMAT])
    return {**found, NAMES_VARIABLE: _names({**os.environ, **found})}


def note_names() -> None:
    """Note in this process's environment what shaped weights before vLLM adds variables, where no unit has done so.

    vLLM's own processes inherit that. A process that is none of these notes anew: what it inherited was another's.
    """
    if os.environ.get(MANIFEST_VARIABLE) and os.environ.get(MODEL_VARIABLE):
        return
    if multiprocessing.parent_process() is None or NAMES_VARIABLE not in os.environ:
        os.environ[NAMES_VARIABLE] = _names(os.environ)


def visible_device(number: str, environ: Mapping[str, str]) -> str:
    """Return the UUID of the GPU, or part of one, of which torch tells the number alone, as this process was given it.

    That of a GPU where it was given none by UUID.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return next((device for device in given if device.partition("-")[2] == number), f"GPU-{number}")


def _names(environ: Mapping[str, str]) -> str:
    return " ".join(shaping_variables({name: value for name, value in environ.items() if name != NAMES_VARIABLE}))


def cache_folder(target: Target) -> Path:
    """Return where an engine of this target keeps its caches."""
    facts = {name: value for name, value in target.fingerprint.facts if name not in _CONTENT}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return target.manifest.directories.cache / target.name / "vllm" / key


def make_cache_folder(target: Target) -> Path:
    """Make that folder, and remove those of weights served longest ago. HostError where it cannot be made."""
    folder = cache_folder(target)
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        folder.touch()
    except OSError as error:
        cache = target.manifest.directories.cache
        raise HostError(
            f"cannot make the cache folder {folder}: {error.strerror}",
            hint=f"directories.cache, {cache}, has to be there, and writable for the user that the engine runs as",
        ) from error
    others: Mapping[Path, float] = {path: path.stat().st_mtime for path in folder.parent.iterdir() if path != folder}
    for path in sorted(others, key=lambda path: others[path], reverse=True)[KEPT_CACHES - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
    return folder
