"""What the README's GPU numbers come from; `python -m bench.gpu.run_all` measures all of it.

Every program prints lines for people and, with `--json FILE`, appends JSON lines. With `--fake` it runs on a GPU in
host memory: the numbers mean nothing then, but every step has been taken.
"""
