"""Container images where no registry can be reached: bases made of the host's own files, and ours built on top."""

import json
import re
import shlex
from pathlib import PurePosixPath
from typing import Any

from tests.host.installed import CHECKOUT, PLACE, VLLM_PLACE, Host, pip_environment

BASE, IMAGE = "localhost/base:1", "localhost/appliance-engine:latest"
VLLM_BASE, VLLM_IMAGE = "localhost/vllm-base:1", "localhost/appliance-vllm:latest"
# vLLM's packages are 2 GB, which would be copied twice: an image of it has links to them, and they are mounted.
VLLM_VOLUME = f"{VLLM_PLACE}:{VLLM_PLACE}:ro"
BUILD_TIMEOUT_S = 300.0
# All that an image of ours adds to its base, but for what Python compiles of the base's own, and folders.
OURS = re.compile(r"/site-packages/appliance[-/]|/bin/appliance$|/__pycache__/|^/tmp$")

# The host's system and the packages of its release, without ours: like any image with Python and torch in it.
_MAKE_BASE = r"""
set -eu
cd /
release=$(readlink -f opt/appliance/current)
release=${release#/}
python=$(ls -d opt/python/bin opt/python/lib 2>/dev/null || true)
# Folders that a container's file systems are mounted on.
tar --create --anchored --exclude='tmp/*' --exclude='run/*' --exclude='var/tmp/*' --exclude='proc/*' --exclude='sys/*' \
    --exclude='dev/*' --exclude='opt/python/lib/python3*/site-packages/*' --exclude='opt/python/lib/python3*/test' \
    --exclude='usr/share/doc' --exclude='usr/share/locale' --exclude='usr/bin/podman' --exclude='usr/libexec/podman' \
    --exclude="$release/lib/*/site-packages/appliance*" --exclude="$release/lib/*/site-packages/torch/include" \
    --exclude="$release/lib/*/site-packages/torch/test" --exclude="$release/lib/*/site-packages/torch/bin/test*" \
    bin sbin lib lib64 usr etc tmp run var/tmp proc sys dev $python "$release" |
    podman import --quiet --change "ENV PATH=/$release/bin:/usr/bin:/bin:/usr/sbin:/sbin" - "$1"
"""

_MAKE_WHEEL = r"""
set -eu
rm -rf /tmp/source wheels
mkdir /tmp/source
cp -R appliance pyproject.toml README.md LICENSE constraints.txt /tmp/source
/opt/appliance/current/bin/python -m pip wheel --quiet --no-deps --wheel-dir wheels /tmp/source
"""

# What the kernel lets root raise is less in there than outside.
_LIMITS = r"""
mkdir -p /etc/containers/containers.conf.d
printf '[containers]\ndefault_ulimits=["nofile=%s:%s","nproc=%s:%s"]\n' \
    "$(ulimit -Hn)" "$(ulimit -Hn)" "$(ulimit -Hu)" "$(ulimit -Hu)" >/etc/containers/containers.conf.d/limits.conf
"""


def build_engine_image(host: Host) -> None:
    """Build the image of container/Containerfile with no network, on a base imported from the host's root."""
    _make_base(host)
    _build_as_documented(host, "container/Containerfile", BASE)


def build_vllm_image(host: Host) -> None:
    """Build the image of container/Containerfile.vllm likewise; its base has vLLM where VLLM_VOLUME is mounted."""
    _make_base(host)
    # The package under test is among them, as a link to its checkout.
    packages = f"mkdir /opt/packages; ln -s {VLLM_PLACE}/* /opt/packages; rm -rf /opt/packages/*appliance*"
    lines = (f"FROM {BASE}", f"RUN {packages}", "ENV PYTHONPATH=/opt/packages")
    build_image(host, VLLM_BASE, *lines, volume=VLLM_VOLUME)
    _build_as_documented(host, "container/Containerfile.vllm", VLLM_BASE, f"--volume={VLLM_VOLUME}")


def build_image(host: Host, name: str, *lines: str, volume: str = "") -> None:
    """Build an image of these lines alone, with a volume mounted meanwhile."""
    options = [f"--tag={name}", *([f"--volume={volume}"] if volume else [])]
    script = 'text=$1; shift; printf %s "$text" | podman build --quiet --network=none --format=docker "$@" -'
    host.machine.run(["sh", "-c", script, "sh", "\n".join((*lines, "")), *options], timeout_s=BUILD_TIMEOUT_S)


def added(host: Host, image: str, base: str) -> tuple[set[str], int]:
    """Return which paths an image adds to its base or changes there, folders left out, and how many bytes it adds."""
    changed = [path for paths in _podman_json(host, "diff", image, base).values() for path in paths]
    folders = {parent for path in changed for parent in _parents(path)}
    sizes = [_podman_json(host, "image", "inspect", name)[0]["Size"] for name in (image, base)]
    return set(changed) - folders, sizes[0] - sizes[1]


def _make_base(host: Host) -> None:
    if host.machine.run(["podman", "image", "exists", BASE], check=False).returncode == 0:
        return
    host.machine.run(["bash", "-c", _LIMITS])
    host.machine.run(["sh", "-c", _MAKE_BASE, "sh", BASE], timeout_s=BUILD_TIMEOUT_S)
    host.machine.run(
        ["env", f"--chdir={PLACE}", "sh", "-c", _MAKE_WHEEL], timeout_s=BUILD_TIMEOUT_S, environment=pip_environment()
    )


def _build_as_documented(host: Host, containerfile: str, base: str, *options: str) -> None:
    texts = [(CHECKOUT / name).read_text().replace("\\\n", "") for name in ("README.md", "container/README.md")]
    wanted = re.compile(rf"^sudo (podman build .*--file {re.escape(containerfile)} .*) \.$", re.MULTILINE)
    # Where both say it, they say the same.
    [documented] = {command for text in texts for command in wanted.findall(text)}
    # Of two bases the last counts.
    command = [*shlex.split(documented), "--quiet", "--network=none", f"--build-arg=BASE={base}", *options, "."]
    host.machine.run(["env", f"--chdir={PLACE}", *command], timeout_s=BUILD_TIMEOUT_S)


def _podman_json(host: Host, *arguments: str) -> Any:
    return json.loads(host.machine.run(["podman", *arguments, "--format=json"]).stdout)


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(path).parents]
