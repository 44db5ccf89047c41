#!/usr/bin/env bash
# A tensor of uint16, such as token ids, goes through pickle, as between processes or in a cache on disk.
# Guess: what pickle.dumps() takes, pickle.loads() gives back, as for uint8 and int16.
# Seen: with PyTorch 2.13.0 uint16, uint32 and uint64 are written, and fail to be read: "'torch.storage.UntypedStorage' has no
# attribute 'dtype'". torch.save() and torch.load() work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.2.6
cat > "$folder/read.py" <<'END'
import io
import pickle

import torch

found = {}
for dtype in (torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64):
    tensor = torch.ones(2, dtype=dtype)
    written = pickle.dumps(tensor)
    try:
        found[str(dtype)] = bool((pickle.loads(written) == tensor).all())
    except AttributeError as error:
        found[str(dtype)] = str(error)
    torch.save(tensor, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file).tolist() == [1, 1]
print(found)
failed = [name for name, own in found.items() if "UntypedStorage" in str(own)]
assert failed == ["torch.uint16", "torch.uint32", "torch.uint64"], failed
END
"$folder/venv/bin/python" "$folder/read.py"
