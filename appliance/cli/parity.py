"""`appliance parity MODEL`: whether vLLM computes with the keeper's weights as with those on disk."""

import os
import subprocess
import sys
from typing import Annotated

import typer

from appliance.cli.options import MANIFEST, JsonOption, ManifestOption, ModelArgument
from appliance.errors import ConfigError, TrustError
from appliance.host.applied import running
from appliance.manifest.load import load_manifest
from appliance.vllm.parity_result import Parity, error_of_end

NAMED_LINES = 20


def parity(
    model: ModelArgument,
    manifest: ManifestOption = MANIFEST,
    as_json: JsonOption = False,
    control: Annotated[
        int, typer.Option(min=0, help="serve both ways so often once more, to see if vLLM repeats its answers")
    ] = 0,
) -> None:
    """Serve a model from disk and from resident weights, and compare every tensor and 20 greedy answers.

    Its engine should be stopped: this starts engines of its own, one after the other. Ends with 77 where they differ;
    answers count only where vLLM's own loading repeats its own, as far as --control tried.
    """
    path = running(manifest)
    settings = load_manifest(path).model(model)
    if settings.engine.kind != "vllm":
        raise ConfigError(
            f"{model}: parity is vLLM's; the built-in engine has tests of its own", hint="appliance restart"
        )
    argv = [sys.executable, "-m", "appliance.vllm.parity", "--manifest", str(path), "--model", model]
    argv += ["--control", str(control)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env=os.environ, check=False)
    result = Parity.read(done.stdout)
    if result is None:
        raise error_of_end(done.returncode, model)
    print(result.line() if as_json else _shown(result))
    if not result.holds:
        raise _difference(result)


def _difference(result: Parity) -> TrustError:
    model, report = result.model, f"appliance evict {result.model}; report this: it is a bug"
    if result.differing:
        return TrustError(f"{model}: attached weights are not those on disk", hint=report)
    said = f"{model}: every tensor is that on disk, but vLLM's answers are others with attached weights"
    if result.repeatable:
        return TrustError(f"{said}, and its own loading repeats its own", hint=report)
    return TrustError(
        said, hint=f"`appliance parity {model} --control 3` tells whether its own loading repeats its own answers"
    )


def _shown(result: Parity) -> str:
    stages = ", ".join(sorted(set(result.stages.values())))
    lines = [f"{result.model}: {len(result.stages)} shards, weights kept as {stages}"]
    lines.append(f"  tensors: {'all equal' if not result.differing else 'DIFFERENT'}")
    lines += [f"    {line}" for line in result.differing[:NAMED_LINES]]
    lines.append(f"  {result.tokens} greedy tokens: {'the same' if result.same_tokens else 'DIFFERENT'}")
    lines.append(f"  log probabilities: {'the same' if result.same_logprobs else 'DIFFERENT'}")
    if result.controls:
        lines.append(f"  vLLM from disk, {result.controls} times more: {result.repeated} said the same")
        lines.append(f"  attached, {result.controls + 1} times: {result.agreed} said what it had said from disk")
    if result.repeatable is False:
        lines.append("  vLLM's own loading does not repeat its own answers here")
        if not result.same_answers:
            lines.append("  that those of attached weights differ says nothing about the weights")
    return "\n".join(lines)
