"""What a checkpoint is: its files, their digests, who signed them, and the one read that proves the bytes.

Nothing here needs torch or pydantic, and importing one file does not import the others' libraries: cryptography comes
with signatures and keys, blake3 with the first BLAKE3 digest.
"""
