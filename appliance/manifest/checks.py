"""What settings may not say together: one port or GPU twice, GPUs that do not match the ranks, paths too long.

Nothing of the host is looked at: a manifest is right or wrong on any machine.
"""

import ipaddress
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from appliance.manifest.capabilities import capability_findings
from appliance.manifest.finding import Finding, touches
from appliance.manifest.problem import SettingPath
from appliance.manifest.schema import GUESSING_METHODS, THREAD_VARIABLES, Engine, Manifest, Model

# struct sockaddr_un has 108 bytes for the path and its closing NUL.
MAX_SOCKET_PATH_BYTES = 107

_LOOPBACK_NAME = "localhost"
_SET_BY_UNITS = ("APPLIANCE_", "CUDA_DEVICE_ORDER", "FDSTORE", "LISTEN_", "NOTIFY_SOCKET", "WATCHDOG_")


def findings(manifest: Manifest, *, wrong: Collection[SettingPath] = ()) -> Iterator[Finding]:
    """Yield every contradiction and warning, in no particular order. Nobody takes a port by a setting that is wrong."""
    yield from _trust(manifest)
    yield from _ports([endpoint for endpoint in _endpoints(manifest) if not touches(endpoint.reads, wrong)])
    yield from _gpus_used_twice(manifest)
    for name, model in manifest.models.items():
        path = ("models", name)
        yield from _socket_path(manifest, name)
        yield from _gpu_count(path, model)
        yield from _draft(path, model)
        yield from _threads(path, model.engine)
        yield from _environment(path, model.engine)
        yield from _image(path, model.engine)
        yield from capability_findings(path, model)


def _trust(manifest: Manifest) -> Iterator[Finding]:
    trust, keys, policy = manifest.trust, ("trust", "keys"), ("trust", "policy")
    if trust.policy == "signed" and not trust.keys:
        yield Finding(keys, "policy: signed needs a key to verify with", reads=(policy,))
    if trust.policy == "local" and trust.keys and "keys" in trust.model_fields_set:
        yield Finding(keys, "not used with policy: local", reads=(policy,), is_error=False)


@dataclass(frozen=True)
class _Endpoint:
    group: SettingPath
    host: str
    port: int

    @property
    def model(self) -> str:
        return str(self.group[1])

    @property
    def owner(self) -> str:
        return f"model {self.model!r}" if self.group[2] == "engine" else f"the health endpoint of model {self.model!r}"

    @property
    def reads(self) -> tuple[SettingPath, ...]:
        return (*self.group, "host"), (*self.group, "port")


def _ports(endpoints: Iterable[_Endpoint]) -> Iterator[Finding]:
    seen: dict[int, list[_Endpoint]] = {}
    for endpoint in endpoints:
        taken = seen.setdefault(endpoint.port, [])
        other = next((other for other in taken if _overlap(endpoint.host, other.host)), None)
        if other is not None:
            owner = "this model's engine" if other.model == endpoint.model else other.owner
            where = "" if other.host == endpoint.host else f" on {other.host}"
            what = f"{endpoint.port} is already used by {owner}{where}"
            yield Finding((*endpoint.group, "port"), what, hint="give one of them another port")
        taken.append(endpoint)
        if not _is_loopback(endpoint.host):
            what = f"{endpoint.host} can be reached from the network, and whoever reaches it is served"
            yield Finding((*endpoint.group, "host"), what, is_error=False)


def _endpoints(manifest: Manifest) -> Iterator[_Endpoint]:
    for name, model in manifest.models.items():
        yield _Endpoint(("models", name, "engine"), model.engine.host, model.engine.port)
        if model.health.port is not None:
            yield _Endpoint(("models", name, "health"), model.health.host, model.health.port)


def _overlap(first: str, second: str) -> bool:
    """Tell whether two listeners on one port get in each other's way; names other than localhost are not resolved."""
    return first == second or _covers(first, second) or _covers(second, first)


def _covers(host: str, other: str) -> bool:
    if host == _LOOPBACK_NAME:
        return other in ("127.0.0.1", "::1")
    address, its = _address(host), _address(other)
    if address is None or not address.is_unspecified:
        return False
    # The IPv6 wildcard listens on IPv4 too, unless the host is set otherwise.
    return address.version == 6 or its is None or its.version == 4


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == _LOOPBACK_NAME or (address is not None and address.is_loopback)


def _gpus_used_twice(manifest: Manifest) -> Iterator[Finding]:
    users: dict[int | str, str] = {}
    for name, model in manifest.models.items():
        for index, gpu in enumerate(model.gpus):
            path = ("models", name, "gpus", index)
            user = users.setdefault(gpu, name)
            if gpu in model.gpus[:index]:
                yield Finding(path, f"GPU {gpu} is listed twice", hint="each rank has a GPU of its own")
            elif user != name:
                yield Finding(path, f"GPU {gpu} is already used by model {user!r}")
    kinds = {type(gpu) for gpu in users}
    if len(kinds) > 1:
        name = next(name for name, model in manifest.models.items() if model.gpus)
        what = "some GPUs go by index and some by UUID, so nobody can tell here whether one is used twice"
        yield Finding(("models", name, "gpus"), what, is_error=False)


def _gpu_count(path: SettingPath, model: Model) -> Iterator[Finding]:
    parallel, count = model.parallel, len(model.gpus)
    if count and count != parallel.world_size:
        sizes = " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in ("tensor", "pipeline", "data"))
        ranks = f"{parallel.world_size} rank" + ("s" if parallel.world_size > 1 else "")
        what = f"{count} GPU{'s' if count > 1 else ''} for {ranks} ({sizes})"
        reads = ((*path, "parallel"), (*path, "engine", "kind"))
        yield Finding((*path, "gpus"), what, hint="list one GPU for each rank", reads=reads)


def _socket_path(manifest: Manifest, name: str) -> Iterator[Finding]:
    size_bytes = len(str(manifest.socket_path(name)).encode("utf-8", "surrogateescape"))
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        what = f"its socket {manifest.socket_path(name)} would have {size_bytes} bytes, and a socket's path has at most"
        yield Finding(("models", name), f"{what} {MAX_SOCKET_PATH_BYTES}", hint="shorten directories.runtime")


def _draft(path: SettingPath, model: Model) -> Iterator[Finding]:
    if model.draft is not None and model.draft.checkpoint is None and model.draft.method is None:
        draft = (*path, "draft")
        yield Finding(draft, "needs a checkpoint, a method or both", reads=(draft,))
    if model.draft is not None and model.draft.checkpoint is not None and model.draft.method in GUESSING_METHODS:
        where = (*path, "draft", "checkpoint")
        what = f"{model.draft.method} guesses from the prompt and loads no model"
        yield Finding(where, what, hint="remove it", reads=((*path, "draft", "method"),))


def _threads(path: SettingPath, engine: Engine) -> Iterator[Finding]:
    if engine.threads is not None and engine.cpus and engine.threads > len(engine.cpus):
        what = f"{engine.threads} threads share {len(engine.cpus)} CPUs"
        yield Finding((*path, "engine", "threads"), what, is_error=False)


def _image(path: SettingPath, engine: Engine) -> Iterator[Finding]:
    if engine.runtime == "podman" and engine.image is None:
        reads = ((*path, "engine", "image"),)
        yield Finding(
            (*path, "engine", "runtime"), "podman needs an image", hint="say which in engine.image", reads=reads
        )
    if engine.runtime == "native" and engine.image is not None:
        reads = ((*path, "engine", "runtime"),)
        yield Finding((*path, "engine", "image"), "not used with runtime: native", reads=reads, is_error=False)


def _environment(path: SettingPath, engine: Engine) -> Iterator[Finding]:
    for name in engine.environment:
        where = (*path, "engine", "environment", name)
        if name.startswith(_SET_BY_UNITS):
            yield Finding(where, "is set by the appliance itself", hint="remove it")
        elif name == "CUDA_VISIBLE_DEVICES":
            yield Finding(where, "is set from the model's gpus", hint="use gpus")
        elif name == "OMP_NUM_THREADS" and engine.threads is not None:
            yield Finding(where, "is set from threads", hint="remove one of them")
        elif name in THREAD_VARIABLES and engine.threads is not None:
            reads = ((*path, "engine", "threads"),)
            yield Finding(where, "goes before threads, for what reads it", reads=reads, is_error=False)
