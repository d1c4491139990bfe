"""A module's tensors: finding, packing, attaching and comparing them. Needs torch."""
