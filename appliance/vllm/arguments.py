"""The command line of `vllm serve` for a model of the manifest; its loader reads the very same one."""

import json
from pathlib import Path

from appliance.manifest.schema import Draft, Model
from appliance.vllm.plugin import LOAD_FORMAT


def serve_arguments(name: str, model: Model, *, configs: Path, draft_configs: Path | None = None) -> list[str]:
    """Return what follows `vllm serve`. `configs` is a folder with everything of the checkpoint but its weights."""
    engine, parallel = model.engine, model.parallel
    arguments = [str(configs), "--served-model-name", name, "--host", engine.host, "--port", str(engine.port)]
    arguments += ["--load-format", LOAD_FORMAT, "--dtype", model.dtype]
    if model.quantization is not None:
        arguments += ["--quantization", model.quantization]
    for option, size in (
        ("--tensor-parallel-size", parallel.tensor),
        ("--pipeline-parallel-size", parallel.pipeline),
        ("--data-parallel-size", parallel.data),
    ):
        if size > 1:
            arguments += [option, str(size)]
    if parallel.expert > 1:
        arguments += ["--enable-expert-parallel"]
    if model.draft is not None:
        arguments += ["--speculative-config", json.dumps(_speculative(model.draft, draft_configs))]
    return [*arguments, *engine.args]


def _speculative(draft: Draft, configs: Path | None) -> dict[str, object]:
    settings = {"method": draft.method, "num_speculative_tokens": draft.tokens}
    if configs is not None:
        settings["model"] = str(configs)
    return {name: value for name, value in settings.items() if value is not None}
