#!/bin/bash
# make_kit.sh OUT: what a GPU machine that reaches no package registry needs beside torch, for CPython 3.12 on x86-64.
# There:  python3 -m pip install --no-index --no-deps --target SITE OUT/*.whl ; export PYTHONPATH=SITE
# OUT/systemd-root.tar.xz, where make_root.sh has put it, is for kill_matrix.py.
set -euo pipefail
mkdir -p -- "$1"
platforms=()
for tag in manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" --dest "$1" \
    pydantic pydantic-core annotated-types typing-inspection blake3 cryptography cffi pycparser fastsafetensors
ls -l -- "$1"
