"""Container images where no registry can be reached: a base made of the host's own files, and ours built on top."""

from tests.host.installed import Host, pip_environment

BASE, IMAGE = "localhost/base:1", "localhost/appliance-engine:latest"
BUILD_TIMEOUT_S = 300.0

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
    bin sbin lib lib64 usr etc tmp run var/tmp proc sys dev $python "$release" |
    podman import --quiet --change "ENV PATH=/$release/bin:/usr/bin:/bin:/usr/sbin:/sbin" - "$1"
"""

_MAKE_WHEEL = r"""
set -eu
rm -rf /tmp/source /root/checkout/wheels
mkdir /tmp/source
cd /root/checkout
cp -R appliance pyproject.toml README.md LICENSE constraints.txt /tmp/source
/opt/appliance/current/bin/python -m pip wheel --quiet --no-deps --wheel-dir /root/checkout/wheels /tmp/source
"""

# What the kernel lets root raise is less in there than outside.
_LIMITS = r"""
mkdir -p /etc/containers/containers.conf.d
printf '[containers]\ndefault_ulimits=["nofile=%s:%s","nproc=%s:%s"]\n' \
    "$(ulimit -Hn)" "$(ulimit -Hn)" "$(ulimit -Hu)" "$(ulimit -Hu)" >/etc/containers/containers.conf.d/limits.conf
"""


def build_engine_image(host: Host) -> None:
    """Build the image of container/Containerfile with no network, on a base imported from the host's root."""
    host.machine.run(["bash", "-c", _LIMITS])
    host.machine.run(["sh", "-c", _MAKE_BASE, "sh", BASE], timeout_s=BUILD_TIMEOUT_S)
    host.machine.run(["sh", "-c", _MAKE_WHEEL], timeout_s=BUILD_TIMEOUT_S, environment=pip_environment())
    build = ["podman", "build", "--quiet", "--network=none", "--format=docker", f"--build-arg=BASE={BASE}"]
    place = "/root/checkout"
    host.machine.run(
        [*build, f"--file={place}/container/Containerfile", f"--tag={IMAGE}", place], timeout_s=BUILD_TIMEOUT_S
    )
