from pathlib import Path, PurePosixPath

from appliance.host.applied import applied
from appliance.host.unit_files import APPLIED, applied_manifest
from tests.systemd.manifests import manifest_of, model


def test_what_was_applied_from_a_manifest_is_found_again_and_from_no_other(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, {"m": model()})
    source, root = tmp_path / "appliance.yaml", tmp_path / "root"
    assert applied(source, root) is None
    (root / APPLIED).parent.mkdir(parents=True)
    (root / APPLIED).write_text(applied_manifest(manifest, PurePosixPath(source)))
    source.write_text("broken: [")
    assert applied(source, root) == manifest
    assert applied(tmp_path / "other.yaml", root) is None
