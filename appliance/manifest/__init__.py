"""The manifest: `appliance.yaml`, the one file an operator edits."""
