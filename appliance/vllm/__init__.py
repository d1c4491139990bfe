"""vLLM as the engine: a load format that attaches or donates, the server that the unit runs, and the loader."""
