"""What each engine kind can do today: the one table to edit when a backend learns something.

A manifest that asks for more is refused before anything starts, with the kind that can do it, if there is one.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from appliance.manifest.arguments import option_name
from appliance.manifest.finding import Finding
from appliance.manifest.problem import SettingPath
from appliance.manifest.schema import Model, Parallel


@dataclass(frozen=True)
class Backend:
    """One engine kind: the axes of `parallel` that may be more than 1, and the optional settings that it takes."""

    name: str
    axes: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    # Arguments that would contradict a setting of the manifest, with that setting.
    own_args: Mapping[str, str] = field(default_factory=dict)
    # Arguments by which the appliance could not find its engine, or say what it was told; why not, and what to do.
    no_args: Mapping[str, tuple[str, str]] = field(default_factory=dict)


_NO_HTTP = "the appliance asks its engine over HTTP", "leave it out: engine.host and engine.port say where"
_NO_TLS = (
    "the appliance asks its engine without TLS",
    "let the engine listen on 127.0.0.1, and end TLS in front of it",
)

MODEL_NAME = "model name"  # in place of a setting: what the manifest calls the model

BACKENDS: Mapping[str, Backend] = {
    "builtin": Backend("the built-in engine"),
    "vllm": Backend(
        "vLLM",
        axes=frozenset({"tensor", "pipeline", "data", "expert"}),
        settings=frozenset({"quantization", "draft", "engine.args"}),
        own_args={
            "--data-parallel-size": "parallel.data",
            "--dtype": "dtype",
            "--enable-expert-parallel": "parallel.expert",
            "--host": "engine.host",
            "--load-format": "engine.kind",
            "--model": "checkpoint",
            "--model-loader-extra-config": "engine.kind",
            "--no-enable-expert-parallel": "parallel.expert",
            "--pipeline-parallel-size": "parallel.pipeline",
            "--port": "engine.port",
            "--quantization": "quantization",
            "--revision": "revision",
            "--served-model-name": MODEL_NAME,
            "--spec-method": "draft",
            "--spec-model": "draft",
            "--spec-tokens": "draft",
            "--speculative-config": "draft",
            "--tensor-parallel-size": "parallel.tensor",
            "-dp": "parallel.data",
            "-ep": "parallel.expert",
            "-pp": "parallel.pipeline",
            "-q": "quantization",
            "-sc": "draft",
            "-tp": "parallel.tensor",
        },
        no_args={
            "--config": (
                "nothing here looks at what its file says, or notices that it changes",
                "write what it says into the manifest",
            ),
            "--grpc": _NO_HTTP,
            "--headless": _NO_HTTP,
            "--ssl-ca-certs": _NO_TLS,
            "--ssl-cert-reqs": _NO_TLS,
            "--ssl-certfile": _NO_TLS,
            "--ssl-ciphers": _NO_TLS,
            "--ssl-keyfile": _NO_TLS,
            "--uds": _NO_HTTP,
        },
    ),
}


def capability_findings(path: SettingPath, model: Model) -> Iterator[Finding]:
    """Yield what this model asks of its engine kind that it cannot do. `path` is the model's."""
    backend = BACKENDS[model.engine.kind]
    kind = (*path, "engine", "kind")
    for axis in Parallel.model_fields:
        size = getattr(model.parallel, axis)
        if size > 1 and axis not in backend.axes:
            others = [name for name, other in BACKENDS.items() if axis in other.axes]
            what = f"{size}: {backend.name} cannot run {axis} parallel"
            yield Finding((*path, "parallel", axis), what, hint=_able(others), reads=(kind,))
    for setting, value in _optional(model).items():
        if value and setting not in backend.settings:
            others = [name for name, other in BACKENDS.items() if setting in other.settings]
            what = f"{backend.name} {_CANNOT[setting]}"
            yield Finding((*path, *setting.split(".")), what, hint=_able(others), reads=(kind,))
    yield from _own_args(path, model, backend)
    yield from _experts(path, model)


_CANNOT = {
    "quantization": "takes no quantization method but what the checkpoint says",
    "draft": "does not speculate with a draft model",
    "engine.args": "takes no further arguments",
}


def _optional(model: Model) -> dict[str, object]:
    return {
        "quantization": model.quantization,
        "draft": model.draft,
        "engine.args": model.engine.args,
    }


def _able(kinds: list[str]) -> str | None:
    return f"engine.kind: {' or '.join(kinds)} can" if kinds else None


def _own_args(path: SettingPath, model: Model, backend: Backend) -> Iterator[Finding]:
    for index, argument in enumerate(model.engine.args):
        # Engines take --speculative-config.method for one key of a group.
        option = option_name(argument).partition(".")[0]
        where, reads = (*path, "engine", "args", index), ((*path, "engine", "kind"),)
        if (own := _option_of(option, backend.own_args)) is not None:
            setting = backend.own_args[own]
            what = f"{_shown(option, own)} is set by the manifest's {setting}"
            yield Finding(where, what, hint=f"use {setting}", reads=reads)
        elif (own := _option_of(option, backend.no_args)) is not None:
            why, hint = backend.no_args[own]
            yield Finding(where, f"{_shown(option, own)}: {why}", hint=hint, reads=reads)


def _shown(option: str, own: str) -> str:
    return option if own == option else f"{option} ({own})"


def _option_of(option: str, own_args: Collection[str]) -> str | None:
    """Return which of these options the engine's parser would take this word for: argparse takes a beginning, too."""
    if option in own_args:
        return option
    if not option.startswith("-") or option in ("-", "--"):
        return None
    for own in own_args:
        # A short option of one letter takes its value without a space: -qfp8.
        if own.startswith(option) or (len(own) == 2 and option.startswith(own)):
            return own
    return None


def _experts(path: SettingPath, model: Model) -> Iterator[Finding]:
    parallel = model.parallel
    ranks = parallel.tensor * parallel.data
    if model.engine.kind == "vllm" and parallel.expert not in (1, ranks):
        what = f"{parallel.expert}: vLLM divides experts over all tensor x data ranks, here {ranks}, or not at all (1)"
        reads = ((*path, "engine", "kind"), (*path, "parallel"))
        yield Finding((*path, "parallel", "expert"), what, reads=reads)
