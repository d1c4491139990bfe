"""What each file of a checkpoint is for: tensors to load, weights in other formats, or configs."""

from collections.abc import Mapping
from pathlib import PurePosixPath

from appliance.checkpoint.file_stream import make_hasher
from appliance.checkpoint.files import IGNORED, CheckpointRoot, is_ignored, open_file, path_fault
from appliance.checkpoint.json_text import parse_object
from appliance.checkpoint.manifest import CheckpointManifest
from appliance.checkpoint.small_file import read_up_to
from appliance.errors import ConfigError, TrustError

SAFETENSORS = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_CONFIGS_BYTES = 256 << 20

# Weights in formats that are hashed like everything else, and never loaded.
OTHER_WEIGHTS = frozenset(
    {".bin", ".ckpt", ".gguf", ".ggml", ".h5", ".keras", ".llamafile", ".mlmodel", ".msgpack", ".nemo", ".npy", ".npz"}
    | {".onnx", ".onnx_data", ".ot", ".pb", ".pdparams", ".pickle", ".pkl", ".pt", ".pt2", ".pth", ".rknn", ".tar"}
    | {".tflite", ".zip"}
)


def is_config(path: str) -> bool:
    """Tell whether a file of the manifest is a config: no tensors, in this format or another, and no bookkeeping."""
    suffix = PurePosixPath(path).suffix.lower()
    return suffix != SAFETENSORS and suffix not in OTHER_WEIGHTS and not is_ignored(path, ignored=IGNORED)


def check_configs(manifest: CheckpointManifest, configs: Mapping[str, bytes]) -> None:
    """Return if these are the bytes of each config in the manifest and nothing else; TrustError, naming one, if not."""
    listed = {path for path in manifest.digests if is_config(path)}
    if odd := sorted(listed.symmetric_difference(configs)):
        state = "is missing from" if odd[0] in listed else "does not belong to"
        raise TrustError(f"checkpoint {manifest.name}: {odd[0][:200]} {state} the configs")
    for path, data in configs.items():
        hasher = make_hasher(manifest.algorithm)
        hasher.update(data)
        if hasher.hexdigest() != manifest.digests[path]:
            raise TrustError(f"checkpoint {manifest.name}: the config {path} is not the one that was signed or pinned")


def read_configs(root: CheckpointRoot, manifest: CheckpointManifest) -> dict[str, bytes]:
    """Return the bytes of each config, which are those of the manifest; TrustError, naming one, if not."""
    configs: dict[str, bytes] = {}
    room_bytes = MAX_CONFIGS_BYTES
    for path in filter(is_config, manifest.digests):
        with open_file(root, path) as descriptor:
            configs[path] = read_up_to(descriptor, room_bytes + 1)
        room_bytes -= len(configs[path])
        if room_bytes < 0:
            raise ConfigError(f"checkpoint {root}: {path}: its configs are larger than {MAX_CONFIGS_BYTES} bytes")
    check_configs(manifest, configs)
    return configs


def tensor_files(manifest: CheckpointManifest, configs: Mapping[str, bytes], *, what: str) -> dict[str, frozenset[str]]:
    """Return the files to load tensors from, and the tensors each must have.

    Those are the files that `model.safetensors.index.json` names; without one `model.safetensors`, or else every
    `*.safetensors` at the top. ConfigError, naming `what` and the file, for an index that is no index or names a file
    that is not in the manifest; and where there is no safetensors file at all.
    """
    if INDEX_NAME in configs:
        return _indexed(configs[INDEX_NAME], manifest, f"{what}: {INDEX_NAME}")
    if SINGLE_NAME in manifest.digests:
        return {SINGLE_NAME: frozenset()}
    found = [path for path in manifest.digests if path.endswith(SAFETENSORS) and "/" not in path]
    if not found:
        raise ConfigError(f"{what}: no safetensors file in it", hint="convert the checkpoint to safetensors")
    return dict.fromkeys(found, frozenset())


def _indexed(data: bytes, manifest: CheckpointManifest, what: str) -> dict[str, frozenset[str]]:
    index = parse_object(data, what=what, limit_bytes=MAX_CONFIGS_BYTES, error=ConfigError)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{what}: has no weight_map, or an empty one")
    tensors: dict[str, set[str]] = {}
    for tensor, path in weight_map.items():
        if not isinstance(path, str):
            raise ConfigError(f"{what}: tensor {tensor[:200]!r} is mapped to no file name")
        if path not in tensors:
            if reason := path_fault(path):
                raise ConfigError(f"{what}: names {path[:200]!r}, which {reason}")
            if not path.endswith(SAFETENSORS):
                raise ConfigError(f"{what}: names {path!r}, which is no safetensors file")
            if path not in manifest.digests:
                raise ConfigError(f"{what}: names {path}, which is not in the checkpoint")
            tensors[path] = set()
        tensors[path].add(tensor)
    return {path: frozenset(names) for path, names in tensors.items()}
