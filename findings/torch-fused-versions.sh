#!/usr/bin/env bash
# A cache of what was computed from weights asks each parameter for its version, which counts changes in place.
# Guess: an optimizer's step counts, whichever implementation it has.
# Seen: with PyTorch 2.13.0 the fused AdamW changes parameters, and their versions stay; the others add one each step. So do
# trainers whose optimizer is fused by default.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.2.6
cat > "$folder/step.py" <<'END'
import torch

found = {}
for kind in ({"fused": True}, {"foreach": True}, {"foreach": False}):
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), **kind)
    layer(torch.ones(1, 4)).sum().backward()
    before, value = layer.weight._version, layer.weight.detach().clone()
    optimizer.step()
    found[str(kind)] = (bool((layer.weight != value).any()), layer.weight._version > before)
print("changed, and counted:", found)
assert found == {"{'fused': True}": (True, False), "{'foreach': True}": (True, True), "{'foreach': False}": (True, True)}
END
"$folder/venv/bin/python" "$folder/step.py"
