"""One table and one picture of all budgets: `python experiments/frontier/report.py runs/frontier/*/compare`.

RUN_DIRs are folders of nas.compare; the name of the folder that holds one is its budget. All networks are timed in the
same rounds; nothing else should run then. OUT gets NAME.csv, a line for each training, and NAME.png. Instead of
folders, such a table may be given, whose times are measured again with --measure. Prints the table: word perplexity on
test, in brackets how far the searched network is from it, with the interval and p of Dunnett's test, and the time for
the same text as a ratio to the reference.
"""

import argparse
import re
import sys
from pathlib import Path

from matplotlib.ticker import LogLocator, NullLocator

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import by_budget, measure_networks, named_network, print_row, read_table
from nas.comparison.results import NetworkResult, choose_metric, describe, make_claims, read_results, spread_notice
from nas.comparison.spec import Settings
from nas.core.errors import InputError, run_command
from nas.core.files import write_text
from nas.core.pattern import abbreviate
from nas.reporting.comparison_report import csv_records, csv_text
from nas.reporting.figures import BLUE, GREY, NAVY, RED, front, new_figure, save, tidy

SHRUNK = "the reference, whole or shrunk"
TIMES = "ms_per_1000_bytes", "time_ratio"  # the latter to the reference
BEYOND = 1.05  # times above this share of the budget are named
NUMBER = re.compile(r"\d+(\.\d+)?")
STYLES = {  # marker, colour and size
    SHRUNK: ("s", GREY, 6),
    "random": ("x", GREY, 5),
    "the paper's method": ("^", NAVY, 6),
    "rules": ("o", BLUE, 5),
    "searched": ("o", RED, 8),
}


def read_runs(folders: list[Path]) -> list[dict]:
    """The lines of a table of folders of nas.compare. Raises InputError if they are not those of a frontier."""
    budgets = {}
    for run in folders:
        budget, results = run.resolve().parent.name, read_results(run)
        if not NUMBER.fullmatch(budget) or budget in budgets:
            raise InputError(f"{run} must lie in a folder that is called as its budget, such as 0.65, one of each")
        if results[0].name != "searched":
            raise InputError(f"{run}: no training of searched has finished, with which the others are compared")
        budgets[budget] = results
    return [{"budget": budget} | one for budget, own in budgets.items() for r in own for one in csv_records(r)]


def budgets_of(records: list[dict]) -> dict[str, list[NetworkResult]]:
    """{budget: results} of the lines of a table; the searched network is the first of each."""
    budgets = by_budget(records).items()
    return {budget: [result_of(name, rows) for name, rows in names.items()] for budget, names in budgets}


def measure(records: list[dict], overrides: list[str]) -> None:
    """Replace the times in the lines of a table."""
    names = list(dict.fromkeys(record["network"] for record in records))
    times = measure_networks(names, overrides)
    for record in records:
        record.pop("latency_ratio", None)  # of nas.compare: to the searched network
        record |= dict(zip(TIMES, times[record["network"]].values(), strict=True))


def result_of(name: str, rows: list[dict[str, str]]) -> NetworkResult:
    """The result of a network. rows: of its trainings in a table."""
    key, runs = rows[0]["network"], []
    network = named_network(key)
    for row in rows:
        run = {"pattern": [*network.blocks]}
        for split in ("valid", "test"):
            words, bits = (float(row[f"{split}_{metric}"]) for metric in ("word_perplexity", "bits_per_byte"))
            run[split] = {"word_perplexity": words, "word_perplexity_comparable": True, "bits_per_byte": bits}
        runs.append(run)
    return NetworkResult(name, key, runs, *(float(rows[0][column]) for column in TIMES), network.vocab_size)


def cells(results: list[NetworkResult]) -> dict[str, str]:
    """{name: cell of the table}"""
    metric = choose_metric(results)
    claims = {claim["pattern"]: claim for claim in make_claims(results, Settings.margin)}
    found = {}
    for result in results:
        found[result.name] = metric.format(result.values(metric))
        if claim := claims.get(result.name):
            found[result.name] += f" ({describe(claim['evidence'], metric)})"
        found[result.name] += f" at {result.ratio:.3f}"
    return found


def label_of(name: str) -> str:
    """The label of a network in the picture."""
    known = {"searched": "searched", "gumbel": "the paper's method", "fewer": SHRUNK, "narrower": SHRUNK}
    return "random" if name.startswith("random") else known.get(name, "rules")


def draw(budgets: dict[str, list[NetworkResult]], path: Path) -> None:
    """Word perplexity over time, with a marker for each kind of network, and the front of all but the searched ones."""
    figure, axes = new_figure(7.5, 4.8)
    metric = choose_metric([result for results in budgets.values() for result in results])
    points, labels = {}, {}  # points by kind
    for results in budgets.values():
        for result in results:
            point = result.ratio, float(result.values(metric).mean())
            points.setdefault(label_of(result.name), []).append(point)
            if result.name == "searched":
                labels[point] = f"{point[1]:,.1f}: {result.vocab_size:,} pieces, {abbreviate(result.blocks)}"
    for kind, (marker, colour, size) in STYLES.items():
        if kind in points:
            axes.plot(*zip(*points[kind], strict=True), marker, color=colour, markersize=size, label=kind)
    others = [point for kind, own in points.items() if kind != "searched" for point in own]
    others_front = {"color": BLUE, "linewidth": 1, "linestyle": ":", "label": "best of the others"}
    axes.step(*zip(*front(others), strict=True), where="post", zorder=1, **others_front)
    for number, budget in enumerate(budgets):
        style = {"color": GREY, "linewidth": 1, "linestyle": "--", "zorder": 0}
        axes.axvline(float(budget), label=None if number else "budgets", **style)
    axes.set_yscale("log")
    axes.margins(x=0.12, y=0.1)
    low, high = axes.get_xlim()
    for point, words in labels.items():
        third = int(3 * (point[0] - low) / (high - low))  # labels of the outer thirds stay within the axes
        below = {"xytext": (0, -18), "textcoords": "offset points", "ha": ("left", "center", "right")[third]}
        axes.annotate(words, point, color=RED, fontsize=9, **below)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="time of inference for the same text, reference = 1", ylabel=f"{metric.name} on test")
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+", metavar="RUN_DIR", help="of nas.compare; or one table")
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="folder of the files")
    parser.add_argument("--name", help="of the files, without ending (default: that of the table, or frontier)")
    parser.add_argument("--measure", action="store_true", help="measure the times of a table again")
    parser.epilog = "options of the trainings, such as data.source=FOLDER, are needed to measure"
    arguments = parser.parse_intermixed_args()
    overrides = [text for text in arguments.given if "=" in text]
    if len(overrides) == len(arguments.given):
        parser.error("give folders of nas.compare, or a table")
    first, *others = (Path(text) for text in arguments.given if "=" not in text)
    given_table = first.suffix == ".csv"
    if given_table and others:
        parser.error("give one table, or folders of nas.compare")
    records = read_table(first) if given_table else read_runs([first, *others])
    if not {"budget", "name", "network"} <= records[0].keys():
        raise InputError(f"{first} is no table of this program")
    if arguments.measure or not given_table:
        measure(records, overrides)
    elif TIMES[1] not in records[0]:
        raise InputError(f"{first} has no {TIMES[1]}: add --measure and the options of its trainings")
    budgets = budgets_of(records)
    tables = {budget: cells(results) for budget, results in budgets.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    print_row("network", *budgets, header=True)
    for name in names:
        print_row(name, *(table.get(name) for table in tables.values()))
    for budget, results in budgets.items():
        ratios = {result.name: result.ratio / float(budget) for result in results}
        if beyond := [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if ratio > BEYOND]:
            print(f"{budget}: beyond {BEYOND} of the budget: {', '.join(beyond)}")
        if notice := spread_notice(results):
            print(f"{budget}: {notice}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = arguments.name or (first.stem if given_table else "frontier")
    write_text(arguments.out / f"{name}.csv", csv_text(records))
    draw(budgets, arguments.out / f"{name}.png")


if __name__ == "__main__":
    run_command(main)
