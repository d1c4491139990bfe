"""What one keeper is told: its socket, its slots, its target. A child process computes it from the manifest.

The child imports pydantic, PyYAML and cryptography and parses what people write; the keeper stays small and
reads only this JSON.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError, HostError
from appliance.fingerprint import Fingerprint

SILENT_CHILD_TIMEOUT_S = 60.0
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Slot:
    """One rank of one role, and the device its weights live on: `cpu` or a GPU's UUID."""

    role: str
    rank: int
    device: str

    @property
    def key(self) -> tuple[str, int]:
        return self.role, self.rank


@dataclass(frozen=True)
class Refusal:
    """Why the checkpoint on disk may not be loaded now."""

    detail: str
    exit_status: int


@dataclass(frozen=True)
class KeeperSettings:
    """`target` is None exactly where `refusal` is set.

    `crowded` are the devices that have no room for these weights beside what is on them; known once they were verified.
    """

    model: str
    runtime: Path
    gid: int | None
    health: tuple[str, int] | None
    slots: tuple[Slot, ...]
    signer: str
    target: Fingerprint | None
    refusal: Refusal | None
    loader: tuple[str, ...]
    raw: bytes
    crowded: tuple[str, ...] = ()

    @property
    def socket_path(self) -> Path:
        return self.runtime / "keeper.sock"


class ChildError(ApplianceError):
    """The child ended with a status of the exit-code table; its own line has been shown already."""

    def __init__(self, message: str, *, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


async def obtain(manifest: Path, model: str, *, on_progress: Callable[[str], None]) -> KeeperSettings:
    """Run the child and return its answer; ChildError with the child's own status where the manifest is broken."""
    return decode(await _child(manifest, model, on_progress=on_progress))


async def verify(manifest: Path, model: str, *, on_progress: Callable[[str], None]) -> KeeperSettings:
    """Have every file of the checkpoint on disk hashed; the answer's refusal says what is not as signed or pinned."""
    return decode(await _child(manifest, model, "--verify", on_progress=on_progress))


def decode(data: bytes) -> KeeperSettings:
    """Return the settings in the child's answer; HostError where it is not one (another version is installed)."""
    try:
        body = json.loads(data)
        return _from_json(body, data)
    except (ValueError, KeyError, TypeError) as error:
        raise HostError(f"cannot read the keeper's settings: {error}", hint="is the installation complete?") from error


def _from_json(body: Any, raw: bytes) -> KeeperSettings:
    target, refusal, health = body["target"], body["refusal"], body["health"]
    return KeeperSettings(
        model=body["model"],
        runtime=Path(body["runtime"]),
        gid=body["gid"],
        health=None if health is None else (health["host"], health["port"]),
        slots=tuple(Slot(slot["role"], slot["rank"], slot["device"]) for slot in body["slots"]),
        signer=body["signer"],
        target=None if target is None else Fingerprint.from_json(target),
        refusal=None if refusal is None else Refusal(refusal["detail"], refusal["exit_status"]),
        loader=tuple(body["loader"]),
        raw=raw,
        crowded=tuple(body.get("crowded", ())),
    )


async def _child(manifest: Path, model: str, *options: str, on_progress: Callable[[str], None]) -> bytes:
    argv = [sys.executable, "-m", "appliance.target", "--manifest", str(manifest), "--model", model, *options]
    try:
        child = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL, limit=MAX_LINE_BYTES
        )
    except OSError as error:
        raise HostError(f"cannot start {sys.executable}: {error.strerror}") from error
    try:
        answer = await _last_line(child, on_progress)
        await child.wait()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode:
        raise ChildError(f"model {model!r} cannot be planned", exit_status=max(child.returncode, 1))
    return answer


async def _last_line(child: asyncio.subprocess.Process, on_progress: Callable[[str], None]) -> bytes:
    answer = b""
    assert child.stdout is not None  # noqa: S101
    try:
        while line := await asyncio.wait_for(child.stdout.readline(), SILENT_CHILD_TIMEOUT_S):
            if line.startswith(b"progress "):
                on_progress(line.decode(errors="replace").removeprefix("progress ").strip())
            else:
                answer = line
    except ValueError as error:  # longer than the stream may buffer
        raise HostError(f"the child's answer is longer than {MAX_LINE_BYTES} bytes") from error
    except TimeoutError as error:
        # Hashing may take an hour, and says at every file and every few seconds how far it is.
        raise HostError(f"nothing was heard of the checkpoint for {SILENT_CHILD_TIMEOUT_S:g} s") from error
    return answer
