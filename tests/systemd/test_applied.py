from pathlib import Path, PurePosixPath

from appliance.host.applied import running
from appliance.host.unit_files import APPLIED, applied_manifest
from appliance.manifest.load import load_manifest
from tests.systemd.manifests import manifest_of, model


def test_what_was_applied_from_a_manifest_is_found_again_and_from_no_other(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, {"m": model()})
    source, other, root = tmp_path / "appliance.yaml", tmp_path / "other.yaml", tmp_path / "root"
    assert running(source, root) == source
    (root / APPLIED).parent.mkdir(parents=True)
    (root / APPLIED).write_text(applied_manifest(manifest, PurePosixPath(source)))
    source.write_text("broken: [")
    assert load_manifest(running(source, root)) == manifest
    assert running(other, root) == other
