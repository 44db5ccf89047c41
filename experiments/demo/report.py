"""A table of several demonstrations: `python experiments/demo/report.py RUN ...`, folders of nas.run.

With --files TEXT it prints instead which source files make the difference between found and usual network vary most
from run to run. TEXT is a split of the sources in the cache.
"""

import argparse
import io
import sys
import sysconfig
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, spell_network
from nas.core.errors import InputError, run_command
from nas.core.files import read_yaml
from nas.core.run_folder import FOUND, PLAN, RESULTS, SUMMARY, USUAL

SHOWN = 4  # files


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    parser.add_argument("--files", metavar="TEXT", type=Path)
    return parser.parse_args()


def print_runs(runs: list[Path]) -> None:
    """A line for each run: the networks in bits per byte, the difference, and the ratio of their times."""
    quality = "found, test", "usual, test", "difference on test", "on valid"
    print_row("seed", "found", "passes over the text", *quality, "time", header=True)
    differences = []
    for run in runs:
        plan, summary = read_yaml(run / PLAN), read_yaml(run / SUMMARY)
        figures = [read_yaml(run / name / RESULTS) for name in (FOUND, USUAL)]
        test, valid = ([one[split]["bits_per_byte"] for one in figures] for split in ("test", "valid"))
        differences.append([found / usual - 1 for found, usual in (test, valid)])
        print_row(
            str(plan["seed"]),
            spell_network(summary[FOUND]),
            f"{plan['train']['epochs']:.3g}",
            *(f"{bits:.4f}" for bits in test),
            *(f"{difference:+.1%}" for difference in differences[-1]),
            f"{summary[FOUND]['time_ratio_to_usual']:.2f}",
        )
    for split, values in zip(("test", "valid"), np.transpose(differences), strict=True):
        better = f"found is better in {(values < 0).sum()} of {len(values)}"
        print(f"{split}: {better}, {values.mean():+.1%} ± {values.std(ddof=1) / len(values) ** 0.5:.1%}")


def find_files(text: str) -> list[tuple[str, int, int]]:
    """The source files of Python in a text: name, first line, and the line after the last."""
    library, found = Path(sysconfig.get_path("stdlib")), []
    for file in sorted(library.rglob("*.py")):
        source = file.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
        place = text.find(source) if source.strip() else -1
        if place == 0 or (place > 0 and text[place - 1] == "\n"):
            first = text.count("\n", 0, place)
            found.append((str(file.relative_to(library)), first, first + source.count("\n")))
    return found


def print_files(runs: list[Path], text: Path) -> None:
    """A line for each of the files that make the difference vary most.

    It has its share of the bytes, the bits per byte of both networks, and the standard deviation over the runs of its
    part of the difference, in bits per byte of the whole text.
    """
    from nas import load_model

    content = text.read_text("utf-8")
    lines = np.array([len(line) for line in io.BytesIO(content.encode())])
    bits = np.array([[load_model(run / name).score(content).line_nll() for name in (FOUND, USUAL)] for run in runs])
    bits /= np.log(2)  # [runs, 2, lines]
    parts = []
    for name, first, end in find_files(content):
        own, size = bits[:, :, first:end].sum(axis=2), lines[first:end].sum()
        spread = ((own[:, 0] - own[:, 1]) / lines.sum()).std(ddof=1)
        parts.append((spread, name, size, own.mean(axis=0) / size, first, end))
    parts.sort(key=lambda part: -part[0])
    print_row("file", "share of the text", "found", "usual", "standard deviation of its difference", header=True)
    for spread, name, size, (found, usual), *_ in parts[:SHOWN]:
        print_row(f"`{name}`", f"{size / lines.sum():.1%}", f"{found:.2f}", f"{usual:.2f}", f"{spread:.4f}")
    *_, first, end = parts[0]
    rest = np.delete(bits, np.arange(first, end), axis=2)
    for what, kept in (("all files", bits), (f"without {parts[0][1]}", rest)):
        found, usual = kept.sum(axis=2).T
        values = found / usual - 1
        print(f"{what}: {values.mean():+.1%}, standard deviation {values.std(ddof=1):.1%}")


def main() -> None:
    arguments = parse_arguments()
    if missing := [run for run in arguments.runs if not (run / SUMMARY).exists()]:
        raise InputError(f"{missing[0]} has no {SUMMARY}: nas.run has not finished there")
    if len(arguments.runs) < 2:
        raise InputError("give at least two runs, because standard deviations need them")
    if arguments.files:
        print_files(arguments.runs, arguments.files)
    else:
        print_runs(arguments.runs)


if __name__ == "__main__":
    run_command(main)
