"""The manifest that is installed: it is right as it is, and shows every setting there is."""

import re
from pathlib import Path

from appliance.manifest.document import parse_document
from appliance.manifest.inventory import every_setting, known_path
from appliance.manifest.load import read_manifest
from appliance.manifest.schema import Manifest
from appliance.manifest.validation import validated

EXAMPLE = Path(__file__).parents[2] / "etc" / "appliance.yaml"


def test_the_example_is_right_and_warns_of_nothing() -> None:
    file = read_manifest(EXAMPLE)
    assert list(file.manifest.models) == ["support-bot"]
    assert file.warnings == ()


def test_the_example_is_right_with_every_comment_taken_away_from_its_settings() -> None:
    document = parse_document(_uncommented(), file="F")
    manifest, warnings = validated(document, folder=Path("/etc/appliance"))
    assert set(manifest.models) == {"support-bot", "reasoner"}
    # It shows the image beside the default, which needs none.
    assert [warning.path for warning in warnings] == [("models", "support-bot", "engine", "image")]


def test_every_setting_occurs_in_the_example_and_no_other() -> None:
    shown = {known_path(path) for path in parse_document(_uncommented(), file="F").settings if _is_named(path)}
    assert shown == {path for path in every_setting() if "*" not in path[-1]} | {
        ("models", "*"),
        ("models", "*", "engine", "environment", "*"),
    }


def test_what_the_example_shows_in_comments_is_the_default() -> None:
    shown, _ = validated(parse_document(_uncommented(), file="F"), folder=Path("/etc/appliance"))
    active = read_manifest(EXAMPLE).manifest
    # Where there is no default, it shows something else.
    changed = {"revision", "engine", "health"}
    shown_model, active_model = shown.model("support-bot"), active.model("support-bot")
    assert shown_model.model_dump(exclude=changed) == active_model.model_dump(exclude=changed)
    own = {"image", "threads", "cpus", "environment"}
    assert shown_model.engine.model_dump(exclude=own) == active_model.engine.model_dump(exclude=own)
    assert shown.model_dump(exclude={"models"}) == active.model_dump(exclude={"models"})
    assert active.model_dump(exclude={"models"}) == Manifest(models={}).model_dump(exclude={"models"})


def _uncommented() -> bytes:
    text = EXAMPLE.read_text()
    return re.sub(r"(?m)^( *)#(?! \S)", r"\1", text).encode()


def _is_named(path: tuple[str | int, ...]) -> bool:
    return bool(path) and not isinstance(path[-1], int)
