"""How a problem reads, and the error that carries all of a file."""

import pytest

from appliance.errors import Place
from appliance.manifest.problem import MAX_SHOWN, ManifestError, Problem, SettingPath, setting_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ((), ""),
        (("models", "chat", "gpus", 1), "models.chat.gpus[1]"),
        (("models", "a b"), "models.'a b'"),
        (("models", "a\nb"), "models.'a\\nb'"),
        (("models", ""), "models.''"),
        (("x" * 5000,), f"'{'x' * 77}...'"),
        ((0, 0), "[0][0]"),
    ],
)
def test_a_setting_is_named_on_one_short_line(path: SettingPath, name: str) -> None:
    assert setting_name(path) == name


def test_problems_are_told_in_the_order_of_the_file() -> None:
    places = [(2, 1), (1, 9), (1, 10), (10, 1), (1, 1)]
    error = ManifestError(Problem(Place("F", line, column), (), "wrong") for line, column in places)
    assert [(problem.place.line, problem.place.column) for problem in error.problems] == sorted(places)
    assert str(error).splitlines()[1] == "F:1:9: wrong"


def test_more_problems_than_anyone_reads_are_cut_short() -> None:
    problems = [Problem(Place("F", line, 1), (), "wrong") for line in range(1, MAX_SHOWN + 2)]
    assert str(ManifestError(problems[:-1])).endswith(f"F:{MAX_SHOWN}:1: wrong")
    assert str(ManifestError(problems)).endswith(f"and more; these are the first {MAX_SHOWN}")
