"""What vLLM calls in each of its processes: the entry point `vllm.general_plugins`."""

LOAD_FORMAT = "appliance"


def register() -> None:
    """Make `--load-format appliance` known to this process; doing it again changes nothing."""
    from vllm.model_executor.model_loader import register_model_loader

    from appliance.descriptors import make_room
    from appliance.vllm.environment import note_names
    from appliance.vllm.model_loader import ApplianceModelLoader

    make_room()
    note_names()
    register_model_loader(LOAD_FORMAT)(ApplianceModelLoader)
