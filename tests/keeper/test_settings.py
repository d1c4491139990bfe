"""What a keeper is told by its child process: read exactly, or an error that says what to do."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ApplianceError, HostError
from appliance.keeper import settings
from appliance.keeper.settings import ChildError, KeeperSettings, Refusal, Slot, decode
from tests.descriptors import count_descriptors, room_for
from tests.keeper.shards import TARGET, settings_json

PYTHON = sys.executable


def encoded(**changes: Any) -> bytes:
    return json.dumps(settings_json(Path("/run/m")) | changes).encode()


def test_settings_are_read_as_they_were_written() -> None:
    data = json.dumps(settings_json(Path("/run/m"), ranks=2, gid=7, health_port=9001, loader=("load", "m"))).encode()
    assert decode(data) == KeeperSettings(
        model="m",
        runtime=Path("/run/m"),
        gid=7,
        health=("127.0.0.1", 9001),
        slots=(Slot("target", 0, "cpu"), Slot("target", 1, "cpu")),
        signer="ab12",
        target=TARGET,
        refusal=None,
        loader=("load", "m"),
        raw=data,
    )
    assert decode(data).socket_path == Path("/run/m/keeper.sock")


def test_a_refusal_is_read_as_it_was_written() -> None:
    refused = decode(json.dumps(settings_json(Path("/run/m"), refusal=Refusal("bad signature", 77))).encode())
    assert (refused.refusal, refused.target) == (Refusal("bad signature", 77), None)


BROKEN = {
    "nothing": b"",
    "not JSON": b"Traceback (most recent call last):",
    "a list": b"[]",
    "null": b"null",
    "no slots": encoded(slots=None),
    "slots of another form": encoded(slots=[["target", 0]]),
    "a slot without a device": encoded(slots=[{"role": "target", "rank": 0}]),
    "a runtime that is a number": encoded(runtime=7),
    "health that is a port": encoded(health=9001),
    "a refusal that is text": encoded(refusal="bad"),
    "a target that is a list": encoded(target=[]),
    "another version's": b'{"v":2}',
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_is_not_settings_is_an_error_and_no_crash(data: bytes) -> None:
    with pytest.raises(ApplianceError):
        decode(data)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Give a way to say, in Python, what the child process does instead."""

    def be(code: str) -> None:
        script = tmp_path / "child"
        script.write_text(f"#!{PYTHON} -IS\nimport os, sys, time, signal\n{code}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return be


def obtained(progress: list[str] | None = None) -> KeeperSettings:
    told = [] if progress is None else progress
    return asyncio.run(settings.obtain(Path("manifest"), "m", on_progress=told.append))


def test_the_last_line_is_the_answer_and_the_others_are_progress(child: Callable[[str], None]) -> None:
    child(f"print('progress reading 1 of 2'); print('progress  reading 2 of 2 '); print({encoded().decode()!r})")
    progress: list[str] = []
    assert obtained(progress).target == TARGET
    assert progress == ["reading 1 of 2", "reading 2 of 2"]


def test_the_child_is_told_the_manifest_and_the_model(child: Callable[[str], None]) -> None:
    child(f"print({encoded().decode()!r}.replace('ab12', ' '.join(sys.argv[1:])))")
    assert obtained().signer == "-m appliance.target --manifest manifest --model m"
    verified = asyncio.run(settings.verify(Path("manifest"), "m", on_progress=lambda text: None))
    assert verified.signer == "-m appliance.target --manifest manifest --model m --verify"


@pytest.mark.parametrize("status", [78, 77, 1])
def test_the_childs_own_status_is_kept(child: Callable[[str], None], status: int) -> None:
    child(f"print('progress x'); sys.exit({status})")
    with pytest.raises(ChildError) as caught:
        obtained()
    assert caught.value.exit_status == status


def test_a_child_that_is_killed_is_a_failure_that_a_restart_may_cure(child: Callable[[str], None]) -> None:
    child("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ChildError) as caught:
        obtained()
    assert caught.value.exit_status == 1


def test_a_child_that_says_nothing_is_an_error_of_the_host(child: Callable[[str], None]) -> None:
    child("pass")
    with pytest.raises(HostError, match="cannot read the keeper's settings"):
        obtained()


def test_a_child_that_says_nothing_for_long_is_killed(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SILENT_CHILD_TIMEOUT_S", 0.2)
    child("print('progress 1', flush=True); time.sleep(600)")
    with pytest.raises(HostError, match=r"nothing was heard of the checkpoint for 0.2 s"):
        obtained()


def test_a_child_that_says_how_far_it_is_may_take_its_time(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SILENT_CHILD_TIMEOUT_S", 1.0)
    steps = "".join(f"print('progress {step}', flush=True); time.sleep(0.1); " for step in range(12))
    child(f"{steps}print({encoded().decode()!r})")
    assert obtained().target == TARGET


def test_a_child_that_does_not_stop_talking_is_killed(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child("while True: os.write(1, b'x' * 65536)")
    with pytest.raises(HostError, match="longer than"):
        obtained()


def test_a_child_that_cannot_be_started_is_an_error_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(HostError, match="cannot start /nonexistent/python"):
        obtained()


def test_without_free_descriptors_the_child_is_an_error_of_the_host(child: Callable[[str], None]) -> None:
    child("pass")

    async def obtain() -> None:
        with room_for(1):
            await settings.obtain(Path("manifest"), "m", on_progress=lambda text: None)

    with pytest.raises(HostError, match="Too many open files"):
        asyncio.run(obtain())


def test_cancelling_kills_the_child_and_leaves_no_descriptor(child: Callable[[str], None], tmp_path: Path) -> None:
    started = tmp_path / "started"
    child(f"print('progress here', flush=True); open({str(started)!r}, 'w'); time.sleep(600)")

    async def cancel() -> None:
        heard = asyncio.Event()
        work = settings.verify(Path("manifest"), "m", on_progress=lambda text: heard.set())
        task = asyncio.create_task(work)
        await asyncio.wait_for(heard.wait(), 20)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    before = count_descriptors()
    asyncio.run(cancel())
    assert count_descriptors() == before
