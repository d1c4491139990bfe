"""Whose weights a process of vLLM serves: the manifest's, or those of one keeper that its command line names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.contents import read_configs
from appliance.checkpoint.digests import stat_files
from appliance.checkpoint.files import find_root
from appliance.errors import ApplianceError, ConfigError, TrustError
from appliance.fingerprint import DRAFT_ROOT_DIGEST, ROOT_DIGEST, Fingerprint
from appliance.handover.terms import Terms
from appliance.record import ShardRecord
from appliance.target import DRAFT
from appliance.vllm.assignment import assignment
from tests.engine.checkpoints import make_checkpoint
from tests.keeper.shards import record_of
from tests.sites import MODEL, Site

SOCKET = "/run/appliance/m/keeper.sock"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("assignment") / "checkpoint")


@pytest.fixture
def site(tmp_path: Path, checkpoint: Path) -> Site:
    return Site(tmp_path, checkpoint, engine={"kind": "vllm", "port": 18000})


def unit(site: Site, **more: str) -> dict[str, str]:
    return {"APPLIANCE_MANIFEST": str(site.manifest), "APPLIANCE_MODEL": MODEL, **more}


def alone(site: Site, environ: Mapping[str, str] | None = None, **extra: Any) -> Any:
    return assignment(environ or {}, extra or {"socket": SOCKET}, model_path=str(site.checkpoint))


def terms_of_draft(site: Site) -> Terms:
    return assignment({}, {"socket": SOCKET}, model_path=str(site.checkpoint), role=DRAFT).terms


def record_and_configs(site: Site) -> tuple[ShardRecord, dict[str, bytes]]:
    """Return what a keeper holds of this checkpoint as it is now."""
    root = find_root(site.checkpoint)
    files = sorted(path.name for path in site.checkpoint.glob("*.safetensors"))
    stats = {path: stat.to_json() for path, stat in stat_files(root, files).items() if stat is not None}
    target = Fingerprint.of({ROOT_DIGEST: site.target().identity.root_digest})
    return record_of(target, files=stats), read_configs(root, site.target().identity.manifest)


def test_the_unit_says_whose_weights(site: Site) -> None:
    found = assignment(unit(site), {}, model_path="/no/matter")
    assert (found.name, found.loads) == ("engine@m", False)
    assert found.target is not None
    assert found.terms.target(None) == found.target.fingerprint
    assert found.terms.socket_path == site.folder / "runtime" / MODEL / "keeper.sock"


def test_the_loader_may_fill_a_slot_whatever_the_manifest_says_of_engines(site: Site) -> None:
    found = assignment(unit(site, APPLIANCE_LOADER="1"), {}, model_path="")
    assert (found.name, found.loads) == ("loader@m", True)


def test_a_manifest_and_a_socket_are_one_too_many(site: Site) -> None:
    with pytest.raises(ConfigError, match="socket beside the manifest"):
        alone(site, unit(site), socket=SOCKET)


@pytest.mark.parametrize("environ", [{}, {"APPLIANCE_MODEL": "m"}, {"APPLIANCE_MANIFEST": "/m.yaml"}])
def test_without_a_manifest_a_keeper_must_be_named(site: Site, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no keeper to ask"):
        assignment(environ, {}, model_path=str(site.checkpoint))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"socket": "keeper.sock"}, "no keeper to ask"),
        ({"socket": 5}, "no keeper to ask"),
        ({"socket": "/a\0b"}, "no keeper to ask"),
        ({"socket": "/a\ud800b"}, "no keeper to ask"),
        ({"socket": SOCKET, "sockets": 1}, "unknown setting 'sockets'"),
        ({"socket": SOCKET, "wait": "long"}, "wait: not a number"),
        ({"socket": SOCKET, "wait": -1}, "wait: not a number"),
        ({"socket": SOCKET, "wait": True}, "wait: not a number"),
        ({"socket": SOCKET, "wait": float("nan")}, "wait: not a number"),
        ({"socket": SOCKET, "wait": float("inf")}, "wait: not a number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(site: Site, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        alone(site, **extra)


@pytest.mark.parametrize("extra", ["{not json", ["socket"], 5, object()])
def test_settings_that_are_no_object_are_refused_with_and_without_a_manifest(site: Site, extra: object) -> None:
    for environ in ({}, unit(site)):
        with pytest.raises(ConfigError, match="is no JSON object") as caught:
            assignment(environ, extra, model_path=str(site.checkpoint))
        assert caught.value.hint is not None and "socket" in caught.value.hint


def test_one_that_was_named_a_keeper_attaches_and_never_donates(site: Site) -> None:
    found = alone(site, socket=SOCKET, wait=3)
    assert (found.terms.on_miss, found.terms.wait_s, found.target) == ("fail", 3.0, None)
    assert found.terms.socket_path == Path(SOCKET)
    assert found.terms.differing_hint is not None and "give vLLM the arguments" in found.terms.differing_hint
    with pytest.raises(ConfigError, match="donates nothing"):
        found.terms.target(None)


def test_a_signed_checkpoint_of_another_digest_asks_for_its_own(site: Site) -> None:
    record, _ = record_and_configs(site)
    assert alone(site).terms.target(record) == record.target
    site.zero("model.norm.weight")
    site.sign()
    other = alone(site).terms.target(record)
    assert other != record.target
    assert other.root_digest == site.target().identity.root_digest


def test_a_signed_checkpoint_is_what_the_keeper_verified(site: Site) -> None:
    record, configs = record_and_configs(site)
    alone(site).terms.check_files(record, configs)


def test_a_draft_of_its_own_is_known_by_its_own_digest(site: Site) -> None:
    of_draft, configs = record_and_configs(site)
    own = of_draft.target.root_digest
    facts = Fingerprint.of({ROOT_DIGEST: "of the target", DRAFT_ROOT_DIGEST: own})
    record = record_of(facts, files=of_draft.files)
    terms = terms_of_draft(site)
    assert terms.target(record) == facts
    assert alone(site).terms.target(record) != facts, "as the target's it would be another checkpoint"
    changed = site.zero("model.norm.weight")
    with pytest.raises(TrustError, match=changed.name):
        terms.check_files(record, configs)
    site.sign()
    assert terms_of_draft(site).target(record) != facts


def test_a_draft_in_its_targets_checkpoint_has_the_targets_digest(site: Site) -> None:
    record, configs = record_and_configs(site)
    terms_of_draft(site).check_files(record, configs)
    assert terms_of_draft(site).target(record) == record.target


def test_changed_tensors_are_refused_by_the_name_of_their_file(site: Site) -> None:
    record, configs = record_and_configs(site)
    changed = site.zero("model.norm.weight")
    with pytest.raises(TrustError, match=changed.name):
        alone(site).terms.check_files(record, configs)


def test_other_configs_than_those_signed_are_refused(site: Site) -> None:
    record, configs = record_and_configs(site)
    with pytest.raises(TrustError, match=r"config\.json"):
        alone(site).terms.check_files(record, configs | {"config.json": configs["config.json"] + b" "})


@pytest.mark.parametrize("signed", [True, False])
def test_what_nobody_has_signed_or_pinned_is_not_read_beside_what_was(site: Site, *, signed: bool) -> None:
    record, configs = record_and_configs(site)
    if not signed:
        (site.checkpoint / "model.sig").unlink()
    (site.checkpoint / "added_tokens.json").write_text("{}")
    with pytest.raises(TrustError, match=r"added_tokens\.json"):
        alone(site).terms.check_files(record, configs)


@pytest.mark.parametrize("change", ["touched", "zeroed", "missing", "configs", "no config", "nothing"])
def test_an_unsigned_checkpoint_must_be_the_very_files_of_the_keeper(site: Site, change: str) -> None:
    record, configs = record_and_configs(site)
    (site.checkpoint / "model.sig").unlink()
    path = next(site.checkpoint.glob("*.safetensors"))
    match change:
        case "touched":
            path.touch()
        case "zeroed":
            site.zero("model.norm.weight")
        case "missing":
            path.unlink()
        case "configs":
            configs |= {"config.json": b"{}"}
        case "no config":
            (site.checkpoint / "config.json").unlink()
    check = alone(site).terms.check_files
    if change == "nothing":
        check(record, configs)
        return
    with pytest.raises(ApplianceError, match=r"config\.json" if "config" in change else path.name) as caught:
        check(record, configs)
    assert isinstance(caught.value, TrustError) or change == "missing"
