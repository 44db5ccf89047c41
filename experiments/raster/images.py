"""Random grey images as bytes, one per pixel, row by row: `python experiments/raster/images.py FOLDER`.

Each image has structure in both directions: a brightness gradient, stripes of random width and angle, filled rectangles
and ellipses, and a little noise. Writes train.bin, valid.bin and test.bin; every call writes the same bytes.
"""

import argparse
from pathlib import Path

import numpy as np

SIDE = 32
IMAGES = {"train": 1600, "valid": 100, "test": 100}
LEVELS = 64  # grey levels


def random_image(source: np.random.Generator) -> np.ndarray:
    """A grey image, uint8 [SIDE, SIDE], values below LEVELS."""
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    slope = source.uniform(-0.4, 0.4, 2)
    image = 0.5 + slope[0] * (x - 0.5) + slope[1] * (y - 0.5)
    angle, width = source.uniform(0, np.pi), source.uniform(2, 8)
    wave = np.sin(2 * np.pi * SIDE / width * (x * np.cos(angle) + y * np.sin(angle)))
    image += source.uniform(0, 0.2) * np.sign(wave)
    for _ in range(source.integers(1, 4)):
        centre, size = source.uniform(0, 1, 2), source.uniform(0.08, 0.3, 2)
        across, down = (x - centre[0]) / size[0], (y - centre[1]) / size[1]
        inside = across**2 + down**2 < 1 if source.random() < 0.5 else np.maximum(abs(across), abs(down)) < 1
        image = np.where(inside, source.uniform(0, 1), image)
    image += source.normal(0, 0.01, image.shape)
    return (image.clip(0, 0.999) * LEVELS).astype(np.uint8)


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(IMAGES.items()):
        source = np.random.default_rng(seed)
        (folder / f"{split}.bin").write_bytes(b"".join(random_image(source).tobytes() for _ in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    arguments = parser.parse_args()
    write_images(arguments.folder)
    print(f"{sum(IMAGES.values()):,} images of {SIDE} x {SIDE} bytes written to {arguments.folder}")


if __name__ == "__main__":
    main()
