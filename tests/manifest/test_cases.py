"""Every file of tests/cases/manifest, whose first lines say what the operator reads.

`# expect: ok` or, for each error, `# expect: LINE:COL: setting: text` and its hint on a line of its own; `# warn:` for
a warning. FILE stands for the path. All errors of a file are there, in its order, and no others.
"""

import re
from pathlib import Path

import pytest
import yaml

from appliance.manifest.document import parse_document
from appliance.manifest.load import read_manifest
from appliance.manifest.problem import ManifestError, Problem
from appliance.manifest.validation import validated

FOLDER = Path(__file__).parents[1] / "cases" / "manifest"
CASES = sorted(FOLDER.glob("*.yaml"))
LINE = re.compile(r"\ufeff?# (?P<word>expect|warn|  hint): (?P<text>.*)")


def test_there_are_cases() -> None:
    assert len(CASES) > 100


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_the_operator_reads_what_the_case_expects(case: Path) -> None:
    try:
        file = read_manifest(case)
    except ManifestError as error:
        assert str(error) == "\n".join(str(problem) for problem in error.problems)
        found = _lines("expect", error.problems, case)
    else:
        found = ["expect: ok", *_lines("warn", file.warnings, case)]
    assert found == _expected(case)


# The parser in C has no word for half a character, and the one in Python leaves it to us.
ONE_PARSER_ALONE = "escape-outside-unicode"


@pytest.mark.parametrize("case", [case for case in CASES if case.stem != ONE_PARSER_ALONE], ids=lambda case: case.stem)
def test_the_parser_in_python_finds_the_same_at_the_same_places(case: Path) -> None:
    assert _found(case, yaml.SafeLoader) == _found(case, yaml.CSafeLoader)


def _expected(case: Path) -> list[str]:
    lines = []
    for line in case.read_bytes().decode("utf-8", "replace").splitlines():
        match = LINE.fullmatch(line)
        if match is None:
            break
        lines.append(f"{match['word']}: {match['text']}")
    assert lines, f"{case.name} does not begin with what it expects"
    return lines


def _lines(word: str, problems: tuple[Problem, ...], case: Path) -> list[str]:
    lines = []
    for problem in problems:
        text = str(problem).removeprefix(f"{case}:").replace(str(case), "FILE")
        lines += f"{word}: {text}".split("\n")
    return lines


def _found(case: Path, loader: type) -> list[tuple[object, ...]]:
    try:
        document = parse_document(case.read_bytes(), file="F", loader=loader)
        manifest, warnings = validated(document, folder=FOLDER)
    except ManifestError as error:
        # The two have words of their own for what is no YAML at all, and hints that go with them.
        return [
            (problem.place, problem.path, "not YAML" if _is_syntax(problem) else problem.message)
            for problem in error.problems
        ]
    return [(manifest,), *((warning.place, warning.path, warning.message) for warning in warnings)]


def _is_syntax(problem: Problem) -> bool:
    return problem.message.startswith("not YAML") or problem.message == "after this it is not YAML"
