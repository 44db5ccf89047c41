#!/usr/bin/env bash
# p of scipy.stats.dunnett differs from call to call for the same samples; that of tukey_hsd does not.
# Guess: a test without resampling has one p for one set of samples.
# Seen: the integral is computed with random points. Six calls give several values; rng=0 fixes them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scipy==1.17.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import numpy as np
from scipy import stats

source = np.random.default_rng(0)
control, others = source.normal(0, 1, 5), [source.normal(1, 1, 5) for _ in range(4)]
values = {float(stats.dunnett(*others, control=control).pvalue[0]) for _ in range(6)}
fixed = {float(stats.dunnett(*others, control=control, rng=0).pvalue[0]) for _ in range(6)}
tukey = {float(stats.tukey_hsd(control, *others).pvalue[0, 1]) for _ in range(6)}
print(f"six calls: dunnett {sorted(values)}, with rng=0 {fixed}, tukey_hsd {tukey}")
assert len(values) > 1 and len(fixed) == len(tukey) == 1
END
