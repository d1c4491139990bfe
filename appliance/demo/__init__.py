"""The main job, end to end, with a real model: what `appliance demo` shows."""
