"""Attach or donate: the one way by which every engine, and its loader, comes to weights. Needs torch."""
