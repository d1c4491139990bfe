"""The built-in engine: a transformers model behind an OpenAI-compatible server.

Importing this package takes the model hub off the table for the whole process: the checkpoint on disk is the only
source of anything, and transformers reads this variable once, when it is first imported.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
