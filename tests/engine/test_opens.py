"""An engine restart opens one file of the checkpoint, whatever the number of its shards: strace counts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.engine.checkpoints import read_tensors
from tests.sites import MODEL, Site
from tests.tiers import cannot_run

ATTACH = """
import sys
from pathlib import Path
from appliance.target import read_target
from appliance.engine.weights import obtain
weights = obtain(read_target(Path(sys.argv[1]), sys.argv[2]), client_name="traced")
print(weights.verdict)
weights.client.close()
"""


def resharded(checkpoint: Path, folder: Path, shards: int) -> Path:
    """Return a copy of a checkpoint, its tensors spread over this many files; the last ones may have none."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = list(read_tensors(checkpoint).items())
    files = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files):
        part = dict(tensors[number::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def opened(site: Site) -> list[str]:
    """Attach in a traced process and return the files of the checkpoint that it opened, in order."""
    argv = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=open,openat,openat2", "-o", str(site.folder / "trace")]
    argv += [sys.executable, "-c", ATTACH, str(site.manifest), MODEL]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "hit"
    trace = (site.folder / "trace").read_text()
    assert "safetensors" in trace  # the library's modules: the trace sees what a process opens
    names = [line.split('"')[1] for line in trace.splitlines() if '"' in line and "O_DIRECTORY" not in line]
    inside = f"{site.checkpoint}/"
    return [name.removeprefix(inside) for name in names if name.startswith(inside) or name in listing(site)]


def listing(site: Site) -> set[str]:
    """Names that a file of the checkpoint has for who opens it relative to its folder."""
    return {path.name for path in site.checkpoint.iterdir()}


@pytest.mark.parametrize("shards", [1, 66])
def test_attaching_opens_the_signature_and_nothing_else(tmp_path: Path, checkpoint: Path, shards: int) -> None:
    if shutil.which("strace") is None:
        cannot_run("strace is not installed")
    site = Site(tmp_path / "site", resharded(checkpoint, tmp_path / "resharded", shards))
    with site.keeper():
        assert opened(site) == ["model.sig"]
