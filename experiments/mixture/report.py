"""A table of trainings with a mixture: `python experiments/mixture/report.py NAME=RUN_DIR,... ... [--out FILE.csv]`.

The run folders of a NAME differ in their seeds. Word perplexities are means over them, and the standard error.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import math

from nas.comparison.results import mean_and_standard_error
from nas.core.errors import run_command
from nas.core.files import read_yaml, write_text
from nas.core.pattern import abbreviate
from nas.core.run_folder import RESULTS
from nas.reporting.comparison_report import csv_text


def row(name: str, folder: Path) -> dict:
    """The word perplexities of a run."""
    file = next(iter(sorted(folder.glob("results-*.yaml"))), folder / RESULTS)  # the latest evaluation, if there is one
    results = read_yaml(file)
    without = results["mixture"].get("test_without_counts") or {"word_perplexity": None}
    network = results["network"] or {split: {"word_perplexity": None} for split in ("valid", "test")}
    return {
        "name": name,
        "blocks": abbreviate(results["pattern"]),
        "seed": read_yaml(folder / "config.yaml")["seed"],
        "valid": results["valid"]["word_perplexity"],
        "test": results["test"]["word_perplexity"],
        "test_without_counts": without["word_perplexity"],
        "network_valid": network["valid"]["word_perplexity"],
        "network_test": network["test"]["word_perplexity"],
    }


def cell(values: list) -> str:
    """Mean and standard error."""
    if None in values:
        return ""
    mean, error = mean_and_standard_error(values)
    return f"{mean:.1f}" + ("" if error is None or math.isnan(error) else f" ± {error:.1f}")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR,...")
    parser.add_argument("--out", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args()
    rows = []
    for given in arguments.runs:
        name, _, folders = given.partition("=")
        rows += [row(name, Path(folder)) for folder in folders.split(",")]
    if arguments.out:
        write_text(arguments.out, csv_text(rows))
    header = ["", "blocks", "seeds", "network alone", "+ caches", "+ caches and counts", "(valid)"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for name in dict.fromkeys(one["name"] for one in rows):
        own = [one for one in rows if one["name"] == name]
        keys = "network_test", "test_without_counts", "test", "valid"
        cells = [name, f"`{own[0]['blocks']}`", str(len(own)), *(cell([one[key] for one in own]) for key in keys)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    run_command(main)
