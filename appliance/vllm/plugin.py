"""What vLLM calls in each of its processes: the entry point `vllm.general_plugins`."""

import os

LOAD_FORMAT = "appliance"


def register() -> None:
    """Make `--load-format appliance` known to this process; doing it again changes nothing."""
    from vllm.model_executor.model_loader import register_model_loader

    from appliance.descriptors import make_room
    from appliance.lifeline import end_with_parent
    from appliance.vllm.assignment import LOADER_VARIABLE
    from appliance.vllm.environment import note_names
    from appliance.vllm.model_loader import ApplianceModelLoader

    if os.environ.get(LOADER_VARIABLE):
        # A worker that waits for its loader waits for one that was killed, too: with the weights mapped, for good.
        end_with_parent()
    make_room()
    note_names()
    register_model_loader(LOAD_FORMAT)(ApplianceModelLoader)
