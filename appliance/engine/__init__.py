"""The built-in engine: a transformers model behind an OpenAI-compatible server.

Importing this package settles two things for the whole process, in variables that are read once, when transformers and
torch are first imported.
"""

import os

# The checkpoint on disk is the only source of anything.
os.environ["HF_HUB_OFFLINE"] = "1"
# Torch's threads otherwise spin while they wait for each other: with one core fewer than threads, an answer takes ten
# times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
