"""Keep LLM weights resident while inference engines come and go, and prove they are the weights asked for."""

__version__ = "0.1.0"
