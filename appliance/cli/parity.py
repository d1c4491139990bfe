"""`appliance parity MODEL`: whether vLLM computes with the keeper's weights as with those on disk."""

import os
import subprocess
import sys
from typing import Annotated

import typer

from appliance.cli.options import MANIFEST, JsonOption, ManifestOption, ModelArgument
from appliance.errors import ConfigError, HostError, TrustError, error_of_status
from appliance.manifest.load import load_manifest
from appliance.vllm.parity_result import Parity

NAMED_LINES = 20


def parity(
    model: ModelArgument,
    manifest: ManifestOption = MANIFEST,
    as_json: JsonOption = False,
    control: Annotated[
        bool, typer.Option("--control", help="also serve from disk twice, to see if that agrees")
    ] = False,
) -> None:
    """Serve a model from disk and from resident weights, and compare every tensor and 20 greedy answers.

    Its engine should be stopped: this starts engines of its own, one after the other. Ends with 77 where they differ.
    """
    settings = load_manifest(manifest).model(model)
    if settings.engine.kind != "vllm":
        raise ConfigError(
            f"{model}: parity is vLLM's; the built-in engine has tests of its own", hint="appliance restart"
        )
    argv = [sys.executable, "-m", "appliance.vllm.parity", "--manifest", str(manifest), "--model", model]
    argv += ["--control"] if control else []
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env=os.environ, check=False)
    result = Parity.read(done.stdout)
    if result is None:
        if done.returncode > 1:
            raise error_of_status(done.returncode, f"{model}: not compared; what is wrong is said above")
        raise HostError(
            f"{model}: not compared: vLLM ended with status {done.returncode}", hint="see its messages above"
        )
    print(result.line() if as_json else _shown(result))
    if not result.holds:
        raise TrustError(
            f"{model}: attached weights are not those on disk",
            hint=f"appliance evict {model}; report this: it is a bug",
        )


def _shown(result: Parity) -> str:
    stages = ", ".join(sorted(set(result.stages.values())))
    lines = [f"{result.model}: {len(result.stages)} shards, weights kept as {stages}"]
    lines.append(f"  tensors: {'all equal' if not result.differing else 'DIFFERENT'}")
    lines += [f"    {line}" for line in result.differing[:NAMED_LINES]]
    lines.append(f"  {result.tokens} greedy tokens: {'the same' if result.same_tokens else 'DIFFERENT'}")
    lines.append(f"  log probabilities: {'the same' if result.same_logprobs else 'DIFFERENT'}")
    if result.repeatable is not None:
        lines.append(f"  vLLM from disk, twice: {'the same' if result.repeatable else 'DIFFERENT'}")
    return "\n".join(lines)
