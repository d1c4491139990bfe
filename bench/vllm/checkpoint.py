"""Write a checkpoint of random bf16 weights with a tokenizer, for vLLM to serve.

python -m bench.vllm.checkpoint FOLDER [--gb 16.4] [--files 8] [--hidden 4096]

The wider, the fewer layers are as large.
"""

import argparse
import time
from pathlib import Path

from bench.gpu.device import prepared, torch_device
from bench.gpu.make_checkpoint import HIDDEN, write
from tests.engine.checkpoints import small_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=16.4)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="a multiple of 512")
    given = parser.parse_args()
    began = time.monotonic()
    with prepared(fake=False):
        written = write(
            given.folder,
            size_bytes=int(given.gb * 1e9),
            files=given.files,
            device=torch_device(0),
            hidden=given.hidden,
        )
    small_tokenizer().save_pretrained(given.folder)
    print(f"{written / 1e9:.2f} GB in {given.files} files, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
