"""What a manifest names and only its host can tell whether it is there: a group, and GPUs.

Units that name one that is not there do not start. Whoever is about to restart them looks first.
"""

import grp
from collections.abc import Iterator, Sequence

from appliance import inventory
from appliance.errors import ConfigError
from appliance.host.unit_files import OWN_GROUP
from appliance.manifest.load import ManifestFile
from appliance.manifest.problem import ManifestError, SettingPath


def require_present(file: ManifestFile) -> None:
    """ManifestError, with the place of each, where this host lacks what the manifest names.

    The appliance's own group is left to the installation, which makes it. HostError where GPUs cannot be asked for.
    """
    if missing := list(_missing(file)):
        raise ManifestError(problem for error in missing for problem in error.problems)


def _missing(file: ManifestFile) -> Iterator[ManifestError]:
    manifest = file.manifest
    if manifest.group not in (None, OWN_GROUP):
        try:
            grp.getgrnam(str(manifest.group))
        except KeyError:
            hint = "groupadd --system makes one; `group: null` does without"
            yield file.error(("group",), f"there is no group {manifest.group!r} on this host", hint=hint)
    for name, model in manifest.models.items():
        setting = ("models", name, "gpus")
        if (whole := _gpu(file, setting, model.gpus)) is not None:
            one_by_one = (_gpu(file, (*setting, index), [gpu]) for index, gpu in enumerate(model.gpus))
            # None of them where an index and a UUID name the same one.
            yield from [error for error in one_by_one if error is not None] or [whole]


def _gpu(file: ManifestFile, setting: SettingPath, names: Sequence[int | str]) -> ManifestError | None:
    try:
        inventory.resolve(names)
    except ConfigError as error:
        return file.error(setting, error.message, hint=error.hint)
    return None
