"""How an engine comes to weights that a keeper in this process serves."""

from appliance.handover.source import Source
from appliance.handover.terms import Terms
from appliance.handover.weights import Weights, obtain
from tests.keeper.serving import WAIT_TIMEOUT_S, Serving
from tests.keeper.shards import TARGET


def obtained(serving: Serving, source: Source) -> Weights:
    """Attach, or load and donate where the keeper has not these weights; the caller closes the client."""
    terms = Terms(
        socket_path=serving.path,
        unit="weights@m",
        wait_s=WAIT_TIMEOUT_S,
        on_miss="load",
        copy=False,
        check_files=lambda record, configs: None,
        target=lambda record: TARGET,
        signer="",
    )
    return obtain(terms, source, client_name="engine@m")
