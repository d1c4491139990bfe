"""Commands that act on resident weights."""

from appliance.cli.options import MANIFEST, ForceOption, ManifestOption, ModelArgument
from appliance.client import KeeperClient, RefusedError
from appliance.errors import ResourceError
from appliance.manifest.load import load_manifest
from appliance.quantities import format_size
from appliance.verdict import Reason


def evict(model: ModelArgument, manifest: ManifestOption = MANIFEST, force: ForceOption = False) -> None:
    """Free a model's weights now. Refused while an engine has them attached, unless forced."""
    parsed = load_manifest(manifest)
    parsed.model(model)
    with KeeperClient.connect(parsed.socket_path(model)) as client:
        try:
            size_bytes = client.evict(force=force)
        except RefusedError as error:
            if error.verdict.reason is Reason.LEASED:
                raise ResourceError(
                    f"{model}: {error.verdict.detail}", hint="stop that engine first, or use --force"
                ) from error
            raise
    print(f"{model}: freed {format_size(size_bytes)}")
