"""What vLLM does with attached weights, row by row, and what a restart of it costs."""
