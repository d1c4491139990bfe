"""The systemd side: from the manifest to drop-ins, and from the difference to what is started, restarted or stopped."""
