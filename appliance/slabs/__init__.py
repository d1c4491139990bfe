"""Slabs: large allocations behind one file descriptor each, in host memory or in a GPU's."""
