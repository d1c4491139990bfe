"""The package is light: each process imports only what its part of a checkpoint needs."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "pydantic", "yaml", "numpy", "transformers", "safetensors", "aiohttp", "model_signing"}


def modules_after(*names: str) -> set[str]:
    script = f"import json, sys\n{''.join(f'import appliance.checkpoint.{name}{chr(10)}' for name in names)}"
    script += "print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_nothing_heavy_comes_with_any_of_it() -> None:
    assert not modules_after("signature", "identity", "findings", "reader", "pins", "keyring") & HEAVY


@pytest.mark.parametrize(
    "name", ["stat_record", "manifest", "safetensors", "digests", "reader", "pins", "contents", "identity", "findings"]
)
def test_only_signatures_need_cryptography_and_only_blake3_needs_blake3(name: str) -> None:
    assert not modules_after(name) & {"cryptography", "blake3", *HEAVY}
