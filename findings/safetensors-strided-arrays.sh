#!/usr/bin/env bash
# safetensors.numpy.save writes the memory of a NumPy array that is a view, not its values.
# Guess: a transposed array is written in its logical order, as numpy.save does, or refused, as safetensors.torch.save
# does.
# Seen: the shape is right and the values are those of the memory; nothing warns. numpy.ascontiguousarray helps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import numpy as np
from safetensors.numpy import load, save

whole = np.arange(6, dtype=np.float32).reshape(2, 3)
views = {"transposed": whole.T, "every second": np.arange(6, dtype=np.float32)[::2]}
for name, view in views.items():
    found = load(save({"x": view}))["x"]
    print(f"{name}: wrote {view.tolist()}, read {found.tolist()}")
    assert found.shape == view.shape and not np.array_equal(found, view)
    assert np.array_equal(load(save({"x": np.ascontiguousarray(view)}))["x"], view)
assert load(save({"x": whole.T}))["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
END
