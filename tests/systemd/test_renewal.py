import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.checkpoint.digests import stat_files
from appliance.checkpoint.identity import identify
from appliance.checkpoint.keys import generate_key, load_private_key
from appliance.checkpoint.signature import sign
from appliance.checkpoint.verification import verify_all
from appliance.errors import ApplianceError, TrustError
from appliance.fingerprint import DRAFT_ROOT_DIGEST, Fingerprint
from appliance.host import renewal
from appliance.host.renewal import changed, roll_out, verify
from appliance.host.seen import Seen
from appliance.manifest.schema import Manifest
from appliance.record import FileFacts
from appliance.target import trust_of
from tests.checkpoint.checkpoints import CONFIG, SHARDS, safetensors_bytes
from tests.systemd.keeper import StandIn, keeper
from tests.systemd.manifests import manifest_of

SETTLED_S = 0.5

SYSTEMCTL = """#!/bin/sh
shift
case "$1" in
show) cat "$STATES/${4%.service}" ;;
*) echo "$*" >>"$STATES/calls" ;;
esac
"""


class Site:
    """A signed checkpoint, and a manifest that names it; with a draft, a second one."""

    def __init__(self, folder: Path, *, drafted: bool = False) -> None:
        self._key = folder / "signer.key"
        generate_key(self._key)
        self.checkpoint = folder / "checkpoint"
        self.checkpoint.mkdir()
        self.write(0)
        model: dict[str, object] = {"checkpoint": str(self.checkpoint), "engine": {"port": 8001}}
        self.draft = folder / "draft"
        if drafted:
            self.draft.mkdir()
            self.write(0, self.draft)
            model["draft"] = {"checkpoint": str(self.draft), "tokens": 2}
            model["engine"] = {"port": 8001, "kind": "vllm"}
        models = {"m": model}
        directories = {"runtime": str(folder / "r"), "state": str(folder / "state")}
        self.manifest: Manifest = manifest_of(
            folder, models, trust={"keys": [str(folder / "signer.pub")]}, directories=directories, group=None
        )
        self.socket = self.manifest.socket_path("m")
        self.seen = Seen(folder / "seen")

    def write(self, version: int, folder: Path | None = None) -> str:
        """Replace the checkpoint by another version, signed, and return its root digest."""
        folder = folder or self.checkpoint
        for name, tensors in SHARDS.items():
            (folder / name).write_bytes(safetensors_bytes(tensors, metadata={"version": str(version)}))
        (folder / "config.json").write_bytes(CONFIG)
        return self.sign(folder)

    def sign(self, folder: Path | None = None) -> str:
        return sign(folder or self.checkpoint, load_private_key(self._key)).root_digest

    def damage(self, folder: Path | None = None) -> Path:
        file = (folder or self.checkpoint) / min(SHARDS)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return file

    def stats(self, folder: Path | None = None) -> dict[str, FileFacts]:
        """Return what a keeper remembers of the files as they are now."""
        identity = identify(folder or self.checkpoint, trust_of(self.manifest))
        found = stat_files(identity.root, identity.manifest.digests)
        return {path: stat.to_json() for path, stat in found.items() if stat is not None}

    def changed(self) -> bool:
        return changed(self.manifest, "m", seen=self.seen)

    def verify(self) -> str:
        return verify(self.manifest, "m", seen=self.seen, tell=lambda text: None, settled_s=SETTLED_S)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "KEEPER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(renewal, "POLL_S", 0.05)


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in for systemctl: states are read from files, and calls are written to `calls`."""
    folder = tmp_path / "states"
    folder.mkdir()
    program = tmp_path / "bin/systemctl"
    program.parent.mkdir()
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STATES", str(folder))
    for unit in ("weights@m", "engine@m"):
        (folder / unit).write_text("active\n")
    yield folder


def test_what_the_keeper_is_loading_is_not_new(site: Site) -> None:
    digest = site.sign()
    with keeper(site.socket, {"root_digest": "", "target_root_digest": digest, "refused": False}):
        assert not site.changed()


@pytest.mark.parametrize("resident", ["", "0" * 64])
def test_another_checkpoint_than_the_keepers_is_new(site: Site, resident: str) -> None:
    with keeper(site.socket, {"root_digest": resident, "target_root_digest": "1" * 64, "refused": False}):
        assert site.changed()


def test_what_the_keeper_has_read_is_not_new(site: Site, states: Path) -> None:
    with keeper(site.socket, {"root_digest": site.sign()}) as told:
        told.files["target"] = site.stats()
        assert not site.changed()
        assert told.seen == [""]
        assert not site.changed()
        assert told.seen == [""], "asked again, of files that nobody touched"


@pytest.mark.parametrize("gone", ["checkpoint", "key"])
def test_what_is_put_back_as_it_was_is_new_to_an_engine_that_failed_meanwhile(
    site: Site, states: Path, tmp_path: Path, gone: str
) -> None:
    path = site.checkpoint if gone == "checkpoint" else tmp_path / "signer.pub"
    with keeper(site.socket, {"root_digest": site.sign()}) as told:
        told.files["target"] = site.stats()
        assert not site.changed()
        path.rename(tmp_path / "aside")
        assert site.changed()
        with pytest.raises(ApplianceError):
            site.verify()
        (states / "engine@m").write_text("failed\n")
        (tmp_path / "aside").rename(path)
        assert site.changed()
        site.verify()
        roll_out(site.manifest, "m", tell=lambda text: None)
        assert not site.changed(), "once is enough"
    assert (states / "calls").read_text().splitlines() == ["reset-failed engine@m.service", "restart engine@m.service"]


def test_a_load_that_is_under_way_is_not_begun_anew_for_an_engine_that_failed(site: Site, states: Path) -> None:
    digest = site.sign()
    (states / "engine@m").write_text("failed\n")
    with keeper(site.socket, {"root_digest": "", "target_root_digest": digest, "refused": False}) as told:
        assert not site.changed()
        told.status["root_digest"] = digest
        told.files["target"] = site.stats()
        assert site.changed(), "but started when it is done"


def test_one_that_the_keeper_refused_is_looked_at_until_it_was(site: Site) -> None:
    digest = site.sign()
    with keeper(site.socket, {"root_digest": "0" * 64, "target_root_digest": digest, "refused": True}):
        assert site.changed()
        site.verify()
        assert not site.changed(), "once is enough"
        site.write(1)
        assert site.changed(), "but not of other files"


def test_without_a_keeper_it_is_looked_at_once(site: Site) -> None:
    assert site.changed()
    site.verify()
    assert not site.changed()


def test_a_new_key_is_a_reason_to_look_again(site: Site, tmp_path: Path) -> None:
    site.verify()
    (tmp_path / "signer.pub").touch()
    assert site.changed()


def test_what_was_verified_is_not_read_again_by_the_keeper(site: Site) -> None:
    site.verify()
    identity = identify(site.checkpoint, trust_of(site.manifest))
    assert not verify_all(identity, site.manifest.directories.state), "hashed again"


def test_a_damaged_file_is_named_to_the_keeper(site: Site) -> None:
    file = site.damage()
    with keeper(site.socket, {}) as told:
        with pytest.raises(TrustError, match=file.name):
            site.verify()
        assert len(told.seen) == 1 and file.name in told.seen[0]
        assert not site.changed()


def test_a_copy_that_is_under_way_is_waited_for(site: Site) -> None:
    file = site.damage()
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    waiting = threading.Event()

    def copy() -> None:
        if not waiting.wait(10):
            return
        # For longer than it takes to be taken for settled.
        for number in range(10):
            (site.checkpoint / ".incoming~").write_bytes(b"x" * number)
            threading.Event().wait(SETTLED_S / 5)
        (site.checkpoint / ".incoming~").unlink()
        file.write_bytes(whole)

    def told(text: str) -> None:
        if text.startswith("waiting for the copy"):
            waiting.set()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        with keeper(site.socket, {}) as keepers:
            verify(site.manifest, "m", seen=site.seen, tell=told, settled_s=SETTLED_S)
            assert keepers.seen == []
    finally:
        waiting.set()
        thread.join()


def test_a_roll_out_restarts_the_keeper_and_then_the_engine(site: Site, states: Path) -> None:
    digest = site.sign()
    with keeper(site.socket, {"root_digest": "0" * 64}) as told:

        def restarted(text: str) -> None:
            told.status["root_digest"] = digest

        roll_out(site.manifest, "m", tell=restarted)
    assert (states / "calls").read_text().splitlines() == ["restart weights@m.service", "restart engine@m.service"]


def test_a_roll_out_of_what_the_keeper_has_already_restarts_nothing(site: Site, states: Path) -> None:
    with keeper(site.socket, {"root_digest": site.sign()}):
        roll_out(site.manifest, "m", tell=lambda text: None)
    assert not (states / "calls").exists()


def test_a_keeper_that_keeps_the_old_weights_keeps_its_engine(site: Site, states: Path) -> None:
    with (
        keeper(site.socket, {"root_digest": "0" * 64, "refused": True}),
        pytest.raises(TrustError, match="not the new"),
    ):
        roll_out(site.manifest, "m", tell=lambda text: None)
    assert (states / "calls").read_text().splitlines() == ["restart weights@m.service"]


def test_what_was_stopped_stays_stopped(site: Site, states: Path) -> None:
    digest = site.sign()
    (states / "weights@m").write_text("inactive\n")
    roll_out(site.manifest, "m", tell=lambda text: None)
    assert not (states / "calls").exists()
    (states / "weights@m").write_text("active\n")
    (states / "engine@m").write_text("inactive\n")
    with keeper(site.socket, {"root_digest": "0" * 64}) as told:
        roll_out(site.manifest, "m", tell=lambda text: told.status.update(root_digest=digest))
    assert (states / "calls").read_text().splitlines() == ["restart weights@m.service"]


def test_units_that_gave_up_are_started_on_a_good_checkpoint(site: Site, states: Path) -> None:
    digest = site.sign()
    for unit in ("weights@m", "engine@m"):
        (states / unit).write_text("failed\n")
    with keeper(site.socket, {"root_digest": ""}) as told:
        roll_out(site.manifest, "m", tell=lambda text: told.status.update(root_digest=digest))
    assert (states / "calls").read_text().splitlines() == [
        f"{verb} {unit}@m.service" for unit in ("weights", "engine") for verb in ("reset-failed", "restart")
    ]


class TestDraft:
    """A draft with a folder of its own is watched and renewed as the model is."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Site:
        return Site(tmp_path, drafted=True)

    @pytest.fixture
    def told(self, site: Site) -> Iterator[StandIn]:
        with keeper(site.socket, {"root_digest": site.sign()}) as told:
            told.target = Fingerprint.of({DRAFT_ROOT_DIGEST: site.sign(site.draft)})
            told.files = {"target": site.stats(), "draft": site.stats(site.draft)}
            yield told

    def test_the_one_that_the_keeper_has_is_not_new_and_another_is(
        self, site: Site, told: StandIn, states: Path
    ) -> None:
        assert not site.changed()
        site.write(1, site.draft)
        assert site.changed()

    def test_another_signature_over_the_same_files_is_not_new_weights(
        self, site: Site, told: StandIn, states: Path
    ) -> None:
        site.sign(site.draft)
        assert not site.changed()

    def test_a_damaged_one_is_named_to_the_keeper(self, site: Site, told: StandIn) -> None:
        file = site.damage(site.draft)
        assert site.changed()
        with pytest.raises(TrustError, match=file.name):
            site.verify()
        assert len(told.seen) == 1 and file.name in told.seen[0]

    def test_a_copy_of_it_is_waited_for(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        site.damage(site.draft)
        waited: list[str] = []
        quiet = {site.checkpoint: iter([9.0, 9.0]), site.draft: iter([0.0, 9.0])}
        monkeypatch.setattr(renewal, "_quiet_s", lambda folder: next(quiet[folder]))
        with pytest.raises(TrustError):
            verify(site.manifest, "m", seen=site.seen, tell=waited.append, settled_s=SETTLED_S)
        assert [text for text in waited if text.startswith("waiting for the copy")] != []

    def test_a_new_one_restarts_the_keeper_and_then_the_engine(self, site: Site, told: StandIn, states: Path) -> None:
        digest = site.write(1, site.draft)

        def restarted(text: str) -> None:
            told.target = Fingerprint.of({DRAFT_ROOT_DIGEST: digest})

        roll_out(site.manifest, "m", tell=restarted)
        assert (states / "calls").read_text().splitlines() == ["restart weights@m.service", "restart engine@m.service"]

    def test_the_one_that_the_keeper_has_restarts_nothing(self, site: Site, told: StandIn, states: Path) -> None:
        roll_out(site.manifest, "m", tell=lambda text: None)
        assert not (states / "calls").exists()


def test_the_unit_is_told_by_exit_status(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setattr(renewal, "SETTLED_S", SETTLED_S)
    path = str(tmp_path / "appliance.yaml")

    def run(step: str, model: str = "m") -> int:
        monkeypatch.setattr("sys.argv", ["renewal", step, "--manifest", path, "--model", model])
        return renewal.main()

    assert (run("changed"), run("verify"), run("changed")) == (0, 0, renewal.UNCHANGED)
    assert run("verify", "nobody") == 78
