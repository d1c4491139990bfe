"""Whose weights a process of vLLM is to serve: what the appliance's unit says, or an engine's own command line.

The unit sets APPLIANCE_MANIFEST and APPLIANCE_MODEL. Without them, `--model-loader-extra-config '{"socket": PATH}'`
names a keeper: then the checkpoint that vLLM was started with must be the one that this keeper has verified.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.checkpoint.contents import check_configs
from appliance.checkpoint.digests import stat_files
from appliance.checkpoint.files import SIGNATURE_NAME, CheckpointRoot, find_root, list_files
from appliance.checkpoint.findings import check_listing
from appliance.checkpoint.identity import Identity, check_files, check_stats
from appliance.checkpoint.signature import claimed_manifest
from appliance.checkpoint.stat_record import FileStat
from appliance.errors import ConfigError, TrustError
from appliance.fingerprint import DRAFT_ROOT_DIGEST, ROOT_DIGEST, Fingerprint
from appliance.handover.terms import Terms, terms_of
from appliance.record import ShardRecord
from appliance.target import DRAFT, TARGET, Target, read_target

MANIFEST_VARIABLE = "APPLIANCE_MANIFEST"
MODEL_VARIABLE = "APPLIANCE_MODEL"
# Set for the loader: this process may fill an empty slot whatever the manifest says of engines.
LOADER_VARIABLE = "APPLIANCE_LOADER"
OUTCOMES_VARIABLE = "APPLIANCE_OUTCOMES"
# The process that started vLLM, and ends it.
STARTER_VARIABLE = "APPLIANCE_STARTER"

DEFAULT_WAIT_S = 600.0
_SETTINGS = {"socket", "wait"}
_EXTRA_CONFIG_HINT = '{"socket": PATH, "wait": SECONDS}'


@dataclass(frozen=True)
class Assignment:
    """The terms of one process, and the name by which a keeper lists it.

    `target` is the manifest's model, if there is one; `loads` is true for the loader.
    """

    terms: Terms
    name: str
    target: Target | None = None
    loads: bool = False


def assignment(environ: Mapping[str, str], extra_config: object, *, model_path: str, role: str = TARGET) -> Assignment:
    """Return what this process is to serve in a role; ConfigError where neither says, or both do."""
    if not isinstance(extra_config, Mapping):
        # vLLM passes on as text whatever is no JSON object.
        raise ConfigError(
            f"--model-loader-extra-config: {str(extra_config)[:80]!r} is no JSON object", hint=_EXTRA_CONFIG_HINT
        )
    manifest, model = environ.get(MANIFEST_VARIABLE), environ.get(MODEL_VARIABLE)
    if manifest and model:
        if extra_config:
            raise ConfigError(
                f"--model-loader-extra-config: {', '.join(sorted(extra_config))} beside the manifest {manifest}",
                hint="the manifest says it all",
            )
        target = read_target(Path(manifest), model)
        loads = bool(environ.get(LOADER_VARIABLE))
        return Assignment(terms_of(target, role=role), f"{'loader' if loads else 'engine'}@{model}", target, loads)
    return _alone(extra_config, find_root(Path(model_path)), role)


def _alone(extra_config: Mapping[str, Any], root: CheckpointRoot, role: str) -> Assignment:
    if unknown := sorted(map(str, extra_config.keys() - _SETTINGS)):
        raise ConfigError(
            f"--model-loader-extra-config: unknown setting {unknown[0][:80]!r}",
            hint=_EXTRA_CONFIG_HINT,
        )
    socket, wait_s = extra_config.get("socket"), extra_config.get("wait", DEFAULT_WAIT_S)
    if not isinstance(socket, str) or not socket.startswith("/") or not socket.isprintable():
        raise ConfigError(
            "--load-format appliance: no keeper to ask",
            hint="""--model-loader-extra-config '{"socket": "/run/appliance/MODEL/keeper.sock"}'""",
        )
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < 1e6:
        raise ConfigError("--model-loader-extra-config: wait: not a number of seconds")
    claimed = None
    if (root.path / SIGNATURE_NAME).exists():
        claimed = Identity(root, claimed_manifest(root), "")

    def target(record: ShardRecord | None) -> Fingerprint:
        if record is None:
            raise ConfigError("without a manifest an engine attaches, and donates nothing")
        if claimed is None:
            return record.target
        return Fingerprint.of({**record.target.to_json(), _digest_fact(record, role): claimed.root_digest})

    def check(record: ShardRecord, configs: Mapping[str, bytes]) -> None:
        if claimed is None:
            _check_unsigned(root, record, configs)
        elif claimed.root_digest == record.fingerprint.get(_digest_fact(record, role)):
            # vLLM was started on this very folder, and reads what lies beside the signed files, too.
            if found := check_listing(claimed):
                raise TrustError(f"checkpoint {root} is not what was signed: {found}")
            recorded = {path: FileStat.from_json(facts) for path, facts in record.files.items()}
            check_files(claimed, check_stats(claimed, recorded))
            check_configs(claimed.manifest, configs)

    keeper = Path(socket)
    terms = Terms(
        socket_path=keeper,
        unit=f"weights@{keeper.parent.name}",
        wait_s=float(wait_s),
        on_miss="fail",
        copy=False,
        check_files=check,
        target=target,
        signer="",
        differing_hint="give vLLM the arguments and variables that these weights were loaded with, or the checkpoint",
    )
    return Assignment(terms, "vllm")


def _digest_fact(record: ShardRecord, role: str) -> str:
    """Return which fact about a shard is the digest of its own checkpoint: a draft may have one, or its target's."""
    return DRAFT_ROOT_DIGEST if role == DRAFT and record.target.to_json().get(DRAFT_ROOT_DIGEST) else ROOT_DIGEST


def _check_unsigned(root: CheckpointRoot, record: ShardRecord, configs: Mapping[str, bytes]) -> None:
    """Compare an unsigned checkpoint with what a keeper has pinned: here nothing else says which one it is."""
    now = stat_files(root, record.files)
    for path, facts in record.files.items():
        if now[path] != FileStat.from_json(facts):
            raise TrustError(
                f"checkpoint {root}: {path} is not the file that the keeper's weights were made of",
                hint="sign the checkpoint, so that a copy can be told from another one",
            )
    if extra := sorted({file.path for file in list_files(root)} - record.files.keys() - configs.keys()):
        raise TrustError(f"checkpoint {root}: {extra[0]} was not there when the keeper's weights were made")
    for path, data in configs.items():
        try:
            own = (root.path / path).read_bytes()
        except OSError as error:
            raise TrustError(f"checkpoint {root}: {path}, which the keeper has: {error.strerror or error}") from error
        if own != data:
            raise TrustError(f"checkpoint {root}: {path} differs from the keeper's")
