"""From a document to a Manifest: what pydantic finds and what the checks find, all of it with its place."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from appliance.manifest.checks import findings
from appliance.manifest.document import Document
from appliance.manifest.finding import is_within, touches
from appliance.manifest.inventory import example
from appliance.manifest.problem import MAX_SHOWN, ManifestError, Problem, SettingPath
from appliance.manifest.schema import Manifest
from appliance.manifest.wording import worded


def validated(document: Document, *, folder: Path) -> tuple[Manifest, tuple[Problem, ...]]:
    """Return the manifest and its warnings; relative paths start at `folder`. ManifestError with every problem."""
    manifest, problems, wrong = _manifest_without_wrong_settings(document, folder)
    warnings: list[Problem] = []
    for finding in findings(manifest, wrong=wrong):
        if not touches(finding.reads, wrong):
            problem = Problem(document.value_place(finding.path), finding.path, finding.message, finding.hint)
            (problems if finding.is_error else warnings).append(problem)
    if problems:
        raise ManifestError(problems)
    return manifest, tuple(warnings)


def _manifest_without_wrong_settings(
    document: Document, folder: Path
) -> tuple[Manifest, list[Problem], set[SettingPath]]:
    """Return a manifest, the problems of single settings, and which settings are wrong.

    If any is wrong, the manifest is what the file would say without them, with an example where a setting is required:
    good for finding the contradictions among the others, so that all is reported at once, and for nothing else.
    """
    problems = list(document.problems)
    wrong = set(document.unread)
    data = deepcopy(document.data)
    # Taking out what is wrong may leave a hole where a setting is required, so this takes more than one turn.
    for _ in range(4):
        try:
            manifest = Manifest.model_validate(data, context={"folder": folder}, by_alias=True, by_name=False)
        except ValidationError as error:
            found = error.errors(include_url=False)
        else:
            return manifest, problems, wrong
        new = [details for details in found if not is_within(_path(details, document), wrong)]
        # Words for a page of nonsense take their time, and nobody reads them.
        problems += [_problem(details, document) for details in new[: MAX_SHOWN + 1]]
        if len(problems) > MAX_SHOWN:
            raise ManifestError(problems)
        wrong.update(_path(details, document) for details in new)
        for details in found:
            data = _repaired(data, _path(details, document), is_missing=details["type"] == "missing")
    raise ManifestError(problems)


def _path(details: Any, document: Document) -> SettingPath:
    path: SettingPath = details["loc"]
    # Pydantic's way to say that it is about the key, unless somebody has a key of that name.
    return path[:-1] if path[-1:] == ("[key]",) and path not in document.settings else path


def _problem(details: Any, document: Document) -> Problem:
    path = _path(details, document)
    is_about_key = details["type"] in ("extra_forbidden", "missing") or details["loc"] != path
    place = document.key_place(path) if is_about_key else document.value_place(path)
    setting = document.settings.get(path)
    message, hint = worded(details, path=path, text=None if setting is None else setting.text)
    return Problem(place, path, message, hint)


def _repaired(data: Any, path: SettingPath, *, is_missing: bool) -> Any:
    """Return the data without the setting at this path, or with an example of it."""
    if not isinstance(data, dict) or not path:
        return {}
    # What is in a list is wrong together with the whole list: taking out an item would move the others.
    group = data
    for item in path[:-1]:
        if not isinstance(group.get(item), dict):
            group.pop(item, None)
            return data
        group = group[item]
    if is_missing:
        group[path[-1]] = example(path)
    else:
        group.pop(path[-1], None)
    return data
