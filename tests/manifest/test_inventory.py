"""The schema as a list of settings and as JSON schema."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.manifest.inventory import every_setting, example, json_schema, known_path, required_settings


def test_every_setting_has_a_description_and_is_in_the_json_schema_with_it() -> None:
    schema = json_schema()
    described = dict(_described(schema, schema, ()))
    for path, field in every_setting().items():
        assert field.description, path
        if path[-1] != "*":
            assert described[path] == field.description, path


def test_the_json_schema_names_its_dialect_and_refuses_unknown_settings() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    groups = [schema, *schema["$defs"].values()]
    assert len(groups) == 8
    assert all(group["additionalProperties"] is False for group in groups)
    assert schema["required"] == ["models"]
    assert schema["$defs"]["Model"]["required"] == ["checkpoint", "engine"]


def test_the_json_schema_speaks_of_settings_as_the_file_does() -> None:
    names = set(json_schema()["$defs"]["Model"]["properties"])
    assert "wait" in names and "wait_s" not in names


def test_the_patterns_of_the_json_schema_are_those_of_javascript_too() -> None:
    for pattern in _values_of("pattern", json_schema()):
        assert not re.search(r"\(\?[^:=!<]|\\[AZz]|[*+?]\+", pattern), pattern


def test_a_setting_without_a_default_has_an_example() -> None:
    for path, field in every_setting().items():
        if field.is_required():
            assert field.examples, path


def test_a_name_that_the_operator_chose_is_a_star_in_the_known_path() -> None:
    assert known_path(("models", "chat", "engine", "port")) == ("models", "*", "engine", "port")
    assert known_path(("models", "engine")) == ("models", "*")
    assert known_path(("nothing", "like", "this")) == ("nothing", "like", "this")
    assert known_path(("models", "chat", "engine", "environment", "A")) == ("models", "*", "engine", "environment", "*")


@pytest.mark.parametrize(
    ("group", "names"),
    [((), ["models"]), (("models",), []), (("models", "x"), ["checkpoint", "engine"]), (("models", "x", "health"), [])],
)
def test_a_group_knows_what_it_cannot_be_without(group: tuple[str, ...], names: list[str]) -> None:
    assert required_settings(group) == names


def test_an_example_is_that_of_the_schema() -> None:
    assert example(("models", "chat", "engine")) == {"port": 8001}
    assert example(("models", "chat", "mode")) is None
    assert example(("nothing",)) is None


def _described(schema: Any, group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, field in group.get("properties", {}).items():
        here = (*path, name)
        yield here, field["description"]
        for below in (field, *field.get("anyOf", []), *field.get("allOf", [])):
            if "$ref" in below:
                yield from _described(schema, _referred(schema, below), here)
            of_any_name = below.get("additionalProperties")
            if isinstance(of_any_name, dict) and "$ref" in of_any_name:
                yield from _described(schema, _referred(schema, of_any_name), (*here, "*"))


def _referred(schema: Any, reference: Any) -> Any:
    return schema["$defs"][reference["$ref"].removeprefix("#/$defs/")]


def _values_of(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get(key), str):
            yield value[key]
        for item in value.values():
            yield from _values_of(key, item)
    elif isinstance(value, list):
        for item in value:
            yield from _values_of(key, item)
