"""The environment that vLLM is started in, and where its caches are."""

import os
from pathlib import Path

import pytest

from appliance.errors import HostError
from appliance.manifest.shaping import NAMES_VARIABLE, shaping_variables
from appliance.vllm.environment import (
    KEPT_CACHES,
    cache_folder,
    environment,
    make_cache_folder,
    note_names,
    visible_device,
)
from tests.engine.checkpoints import make_checkpoint
from tests.sites import MODEL, Site

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("environment") / "checkpoint")


@pytest.fixture
def site(tmp_path: Path, checkpoint: Path) -> Site:
    return Site(tmp_path, checkpoint, engine={"kind": "vllm", "port": 18000})


def of(site: Site) -> dict[str, str]:
    return environment(site.target(), site.manifest)


def test_it_says_whose_weights_and_that_nothing_is_fetched(site: Site) -> None:
    found = of(site)
    assert (found["APPLIANCE_MANIFEST"], found["APPLIANCE_MODEL"]) == (str(site.manifest), MODEL)
    assert found["HF_HUB_OFFLINE"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == ""


def test_the_manifests_variables_go_before_the_appliances(site: Site) -> None:
    site.write(engine={"kind": "vllm", "port": 18000, "threads": 2})
    assert of(site)["OMP_NUM_THREADS"] == "2"
    site.write(engine={"kind": "vllm", "port": 18000, "environment": {"VLLM_CACHE_ROOT": "/elsewhere"}})
    assert of(site)["VLLM_CACHE_ROOT"] == "/elsewhere"


def test_whatever_plugins_are_chosen_the_load_format_is_among_them(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert "VLLM_PLUGINS" not in of(site), "all of them are loaded"
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert of(site)["VLLM_PLUGINS"] == "theirs,appliance"
    site.write(engine={"kind": "vllm", "port": 18000, "environment": {"VLLM_PLUGINS": ""}})
    assert of(site)["VLLM_PLUGINS"] == "appliance"


def test_every_cache_lies_below_one_folder_that_stays_the_same(site: Site) -> None:
    folder = cache_folder(site.target())
    assert folder.is_relative_to(site.folder / "cache" / MODEL / "vllm")
    for variable in CACHES:
        assert Path(of(site)[variable]).parent == folder
    assert cache_folder(site.target()) == folder


def test_what_is_compiled_otherwise_has_other_caches_and_new_weights_of_the_same_kind_have_not(site: Site) -> None:
    before = cache_folder(site.target())
    site.write(dtype="float32")
    other = cache_folder(site.target())
    assert other != before
    site.write(dtype="auto")
    assert cache_folder(site.target()) == before
    site.zero("model.norm.weight")
    site.sign()
    assert cache_folder(site.target()) == before


def test_the_names_of_facts_are_told_and_not_those_that_vllm_adds(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FROM_THE_UNIT", "1")
    # That of a process which started this one: not to be taken for ours.
    monkeypatch.setenv(NAMES_VARIABLE, "VLLM_STALE")
    site.write(engine={"kind": "vllm", "port": 18000, "environment": {"VLLM_FROM_THE_MANIFEST": "1"}})
    names = set(of(site)[NAMES_VARIABLE].split())
    assert {"VLLM_FROM_THE_UNIT", "VLLM_FROM_THE_MANIFEST"} <= names
    assert not names & {"VLLM_STALE", "VLLM_CACHE_ROOT", "VLLM_NO_USAGE_STATS"}
    assert set(shaping_variables({**os.environ, **of(site), "VLLM_ADDED_LATER": "1"})) == names


@pytest.mark.parametrize("inherited", [None, "VLLM_STALE"])
def test_without_a_unit_names_are_noted_before_vllm_adds_variables(
    monkeypatch: pytest.MonkeyPatch, inherited: str | None
) -> None:
    given(monkeypatch, {NAMES_VARIABLE: inherited, "VLLM_MINE": "1"})
    note_names()
    monkeypatch.setenv("VLLM_ADDED_LATER", "1")
    names = shaping_variables(os.environ)
    assert "VLLM_MINE" in names
    assert not {"VLLM_STALE", "VLLM_ADDED_LATER"} & set(names)


def test_vllms_own_processes_keep_the_names_that_the_first_has_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", object)
    given(monkeypatch, {NAMES_VARIABLE: "VLLM_MINE", "VLLM_ADDED": "1"})
    note_names()
    assert shaping_variables(os.environ) == ["VLLM_MINE"]
    monkeypatch.delenv(NAMES_VARIABLE)
    note_names()
    assert "VLLM_ADDED" in shaping_variables(os.environ), "nobody has noted any: better one too many"


def test_the_names_that_a_unit_has_given_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = {"APPLIANCE_MANIFEST": "/m.yaml", "APPLIANCE_MODEL": MODEL, NAMES_VARIABLE: "VLLM_UNIT"}
    given(monkeypatch, {**unit, "VLLM_ADDED": "1"})
    note_names()
    assert shaping_variables(os.environ) == ["VLLM_UNIT"]


def given(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str | None]) -> None:
    """Have this process started with these; what is set to them later is taken back with them."""
    for name, value in {"APPLIANCE_MANIFEST": None, "APPLIANCE_MODEL": None, NAMES_VARIABLE: None, **environ}.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)


def test_caches_used_longest_ago_are_removed(site: Site) -> None:
    folder = cache_folder(site.target())
    folder.parent.mkdir(parents=True)
    for age_s, name in enumerate(("a", "b", "c", "d"), start=1):
        (folder.parent / name).mkdir()
        (folder.parent / name / "kernel").write_text("")
        os.utime(folder.parent / name, (1e9 - age_s, 1e9 - age_s))
    assert make_cache_folder(site.target()) == folder
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, "a", "b"}
    assert KEPT_CACHES == 3


def test_what_a_cache_holds_is_still_there_at_the_next_start(site: Site) -> None:
    (make_cache_folder(site.target()) / "kernel").write_text("compiled")
    assert (make_cache_folder(site.target()) / "kernel").read_text() == "compiled"


def test_a_cache_folder_that_cannot_be_made_is_the_hosts_failure(site: Site) -> None:
    cache = site.target().manifest.directories.cache
    cache.mkdir(parents=True, exist_ok=True)
    (cache / MODEL).write_text("in the way")
    with pytest.raises(HostError, match="cannot make the cache folder") as caught:
        make_cache_folder(site.target())
    assert caught.value.hint is not None and str(cache) in caught.value.hint


@pytest.mark.parametrize(
    ("given", "device"),
    [
        ("GPU-1-2,GPU-3-4", "GPU-3-4"),
        ("MIG-1-2,MIG-3-4", "MIG-3-4"),
        ("0,1", "GPU-3-4"),
        ("", "GPU-3-4"),
    ],
)
def test_a_device_has_the_name_under_which_the_process_was_given_it(given: str, device: str) -> None:
    assert visible_device("3-4", {"CUDA_VISIBLE_DEVICES": given}) == device
    assert visible_device("3-4", {}) == "GPU-3-4"
