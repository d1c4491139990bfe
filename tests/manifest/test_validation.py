"""Whatever a well-formed file says, it is a Manifest or a list of problems with places."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.manifest.checks import findings
from appliance.manifest.document import parse_document
from appliance.manifest.inventory import every_setting
from appliance.manifest.problem import ManifestError
from appliance.manifest.schema import Manifest
from appliance.manifest.validation import validated

# For each kind of setting something right, something nearly right, and something that has no business there.
RIGHT: dict[str, list[object]] = {
    "checkpoint": ["/srv/a", "b"],
    "dtype": ["auto", "float16"],
    "gpus": [[], [0], [0, 1], ["GPU-0a1b2c3d-0000-1111-2222-333344445555"]],
    "kind": ["builtin", "vllm"],
    "port": [8001, 8002, 8003],
    "host": ["127.0.0.1", "::", "localhost", "0.0.0.0", "gpu7"],
    "mode": ["copy"],
    "policy": ["signed", "local"],
    "keys": [[], ["a.pem"]],
    "wait": ["5m", 30],
    "tensor": [1, 2],
    "expert": [1, 2],
    "args": [[], ["--port=1"], ["-x", 3]],
    "environment": [{}, {"A": "b"}, {"OMP_NUM_THREADS": 1}],
    "threads": [1, 8],
    "cpus": ["0-3", [1, 2]],
    "runtime": ["native", "podman", "/run/x" * 20],
    "image": ["localhost/engine:1"],
    "draft": [{"method": "mtp"}, {"checkpoint": "/d"}, {}],
}
WRONG: st.SearchStrategy[object] = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1.5,
        10**17,
        "",
        "x",
        "a\nb",
        "~",
        "~/x",
        "08",
        "x" * 5000,
        [],
        [[]],
        {},
        {"a": 1},
        [None],
        "\x1f",
    ]
)
KNOWN = list(every_setting())


def _values(path: tuple[str, ...]) -> st.SearchStrategy[object]:
    right = RIGHT.get(path[-1])
    return WRONG if right is None else st.sampled_from(right) | st.sampled_from(right) | st.sampled_from(right) | WRONG


def _group(path: tuple[str, ...]) -> st.SearchStrategy[object]:
    names = [known[-1] for known in KNOWN if known[:-1] == path]
    below = {
        name: _group((*path, name)) if any(k[:-1] == (*path, name) for k in KNOWN) else _values((*path, name))
        for name in names
    }
    if names == ["*"]:
        return st.dictionaries(st.sampled_from(["a", "b", "c", "[key]", "engine", "A B"]), below["*"], max_size=4)
    some = st.fixed_dictionaries({}, optional={**below, "unknown": WRONG})
    required = {name: value for name, value in below.items() if every_setting()[*path, name].is_required()}
    whole = st.fixed_dictionaries(required, optional={name: below[name] for name in below if name not in required})
    return st.one_of(whole, whole, whole, some, WRONG)


@settings(max_examples=150, deadline=None)
@given(_group(()))
def test_settings_of_any_value_are_a_manifest_or_problems_at_their_places(data: object) -> None:
    source = yaml.safe_dump(data, allow_unicode=True).encode()
    document = parse_document(source, file="F")
    try:
        manifest, warnings = validated(document, folder=Path("/etc/appliance"))
    except ManifestError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.place.line <= source.count(b"\n") + 1
            assert str(problem).count("\n") == (problem.hint is not None)
            assert "Input should" not in str(problem) and "None" not in problem.message
    else:
        assert not [finding for finding in findings(manifest) if finding.is_error]
        assert len(warnings) == len([finding for finding in findings(manifest) if not finding.is_error])


def test_a_document_is_not_changed_by_looking_at_what_is_wrong_in_it() -> None:
    document = parse_document(b"models: {a: {mode: copi, engine: {prot: 1}}}\n", file="F")
    for _ in range(2):
        with pytest.raises(ManifestError) as caught:
            validated(document, folder=Path("/etc/appliance"))
        assert len(caught.value.problems) == 4
    assert document.data == {"models": {"a": {"mode": "copi", "engine": {"prot": 1}}}}


@settings(max_examples=60, deadline=None)
@given(_group(("models", "*")))
def test_a_model_is_as_right_or_wrong_beside_a_wrong_one_as_alone(data: object) -> None:
    alone = _problems({"models": {"a": data}})
    beside = _problems({"models": {"a": data, "b": {"checkpont": "/x"}}, "unknown": 1})
    assert [text for path, text in beside if path[:2] == ("models", "a")] == [text for _, text in alone]


def _problems(data: Mapping[str, Any]) -> list[tuple[tuple[str | int, ...], str]]:
    document = parse_document(yaml.safe_dump(data).encode(), file="F")
    try:
        manifest, _ = validated(document, folder=Path("/etc/appliance"))
    except ManifestError as error:
        return sorted((problem.path, problem.message) for problem in error.problems)
    assert isinstance(manifest, Manifest)
    return []
