"""Commands that act on resident weights."""

from appliance.cli.options import MANIFEST, ForceOption, ManifestOption, ModelArgument
from appliance.client import KeeperClient, RefusedError
from appliance.errors import ResourceError
from appliance.manifest.load import load_manifest
from appliance.quantities import format_size
from appliance.verdict import Reason

_HINTS = {
    Reason.LEASED: "stop that engine first, or use --force",
    Reason.LOADING: "wait until they are loaded, or use --force",
}


def evict(model: ModelArgument, manifest: ManifestOption = MANIFEST, force: ForceOption = False) -> None:
    """Free a model's weights now. Refused while an engine has them attached, unless forced."""
    parsed = load_manifest(manifest)
    parsed.model(model)
    with KeeperClient.connect(parsed.socket_path(model)) as client:
        try:
            size_bytes = client.evict(force=force)
        except RefusedError as error:
            reason = error.verdict.reason
            if reason is None or (hint := _HINTS.get(reason)) is None:
                raise
            raise ResourceError(f"{model}: {error.verdict.detail}", hint=hint) from error
    print(f"{model}: freed {format_size(size_bytes)}")
