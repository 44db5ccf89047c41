"""Write a text of Python's standard library: `python experiments/hybrid/library.py FOLDER`.

The text holds the source files of the Python that runs this program, without tests and tables of encodings. Their order
is random, because a training reads only the beginning of train.txt. Every 20th file is in valid.txt, every 20th in
test.txt, and the others are in train.txt. The text depends on Python's version.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.core.errors import run_command

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages"}  # idlelib and lib2to3 hold test data
SPLITS = {0: "valid", 10: "test"}  # by the index of a file modulo 20; the others are train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(library.rglob("*.py")) if not LEFT_OUT & set(file.relative_to(library).parts)]
    np.random.default_rng(1).shuffle(files)
    texts = {"train": [], "valid": [], "test": []}
    for index, file in enumerate(files):
        texts[SPLITS.get(index % 20, "train")].append(file.read_text("utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        (folder / f"{split}.txt").write_text("".join(text), "utf-8")


if __name__ == "__main__":
    run_command(main)
