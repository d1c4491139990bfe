"""Every setting that the schema knows, by its path, and the JSON schema that an editor completes and checks with."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from appliance.manifest.problem import SettingPath
from appliance.manifest.schema import Manifest, Settings

KnownPath = tuple[str, ...]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of the file."""
    schema = Manifest.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "appliance.yaml"}


@cache
def every_setting() -> Mapping[KnownPath, FieldInfo]:
    """Map the path of every setting to its field, with `*` for a name that the operator chooses."""
    return dict(_settings_below((), Manifest))


def known_path(path: SettingPath) -> KnownPath:
    """Return a path of a file as `every_setting` has it; what is unknown stays as it is."""
    known: KnownPath = ()
    for item in path:
        step = (*known, str(item))
        any_name = (*known, "*")
        known = any_name if step not in every_setting() and any_name in every_setting() else step
    return known


def example(path: SettingPath) -> Any:
    """Return a value that this setting may have, None if the schema gives none."""
    field = every_setting().get(known_path(path))
    return field.examples[0] if field is not None and field.examples else None


def required_settings(path: SettingPath) -> list[str]:
    """Return the names of what a group cannot be without."""
    group = known_path(path)
    return [known[-1] for known, field in every_setting().items() if known[:-1] == group and _is_required(known, field)]


def _is_required(path: KnownPath, field: FieldInfo) -> bool:
    return path[-1] != "*" and field.is_required()


def _settings_below(path: KnownPath, group: type[Settings]) -> Iterator[tuple[KnownPath, FieldInfo]]:
    for name, field in group.model_fields.items():
        here = (*path, field.alias or name)
        yield here, field
        kind: Any = field.annotation
        if get_origin(kind) is Mapping:
            here, kind = (*here, "*"), get_args(kind)[1]
            yield here, field
        for alternative in (kind, *get_args(kind)):
            if isinstance(alternative, type) and issubclass(alternative, Settings):
                yield from _settings_below(here, alternative)
