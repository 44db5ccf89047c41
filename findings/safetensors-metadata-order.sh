#!/usr/bin/env bash
# safetensors writes metadata in random order, so equal content has unequal files.
# Guess: the same tensors and metadata give the same bytes; the tensors have a fixed order, after all.
# Seen: eight entries of metadata have another order in nearly each call, so a SHA-256 of the file identifies nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import hashlib

import numpy as np
from safetensors.numpy import save

metadata, tensors = {f"key {number}": "x" for number in range(8)}, {"b": np.ones(2), "a": np.ones(2)}
digests = {hashlib.sha256(save(tensors, metadata)).hexdigest() for _ in range(20)}
bare = {hashlib.sha256(save(dict(sorted(tensors.items(), reverse=up)))).hexdigest() for up in (True, False)}
print(f"20 calls with metadata: {len(digests)} different files; 2 orders of tensors without metadata: {len(bare)}")
assert len(digests) > 10 and len(bare) == 1
END
