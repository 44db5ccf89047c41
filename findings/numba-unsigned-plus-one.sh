#!/usr/bin/env bash
# Numba adds 1 to an unsigned 64-bit number as a signed one; NumPy stays unsigned.
# Guess: a hash in numpy.uint64 plus a literal is a numpy.uint64 in compiled code, as NumPy 2 makes it.
# Seen: the sum is int64: 2**63 + 4 is negative, and % of it has another result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numba==0.68.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import numba
import numpy as np


def bucket(key):
    return (key + 1) % 1000


compiled, key = numba.njit(bucket), np.uint64(2**63 + 3)
print(f"NumPy {bucket(key)}, compiled {compiled(key)}")
assert int(bucket(key)) == (2**63 + 4) % 1000 == 812
assert numba.typeof(numba.njit(lambda number: number + 1)(key)) == numba.int64
assert compiled(key) == (2**63 + 4 - 2**64) % 1000 != 812
END
