"""The keeper: holds a model's shards as descriptors, serves them, and has the service manager keep them too.

Nothing here imports torch, an engine, pydantic or a YAML parser: a keeper stays small for months.
"""
