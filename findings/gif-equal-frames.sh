#!/usr/bin/env bash
# A GIF that imageio and Pillow write has fewer frames than were given, and other times.
# Guess: six frames of 35 ms are six frames of 35 ms, or of 40.
# Seen: equal frames in turn become one, whose time is their sum; times are cut to hundredths of a second, so 19 ms
# are 10.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check imageio==2.38.1 pillow==13.0.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import io

import imageio.v3 as imageio
import numpy as np
from PIL import Image


def times(levels, duration):
    file = io.BytesIO()
    frames = np.stack([np.full((8, 8), level, np.uint8) for level in levels])
    imageio.imwrite(file, frames, extension=".gif", duration=duration, loop=0)
    with Image.open(file) as picture:
        found = []
        for index in range(picture.n_frames):
            picture.seek(index)
            found.append(picture.info["duration"])
    return found


print("six frames, three of them like the one before, 100 ms each:", times([0, 0, 0, 255, 255, 0], 100))
print("three frames of 35 ms:", times([0, 50, 100], 35), "of 19 ms:", times([0, 50, 100], 19))
assert times([0, 0, 0, 255, 255, 0], 100) == [300, 200, 100]
assert times([0, 50, 100], 35) == [30] * 3 and times([0, 50, 100], 19) == [10] * 3
END
