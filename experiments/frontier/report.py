"""One table and one picture of all budgets: `python experiments/frontier/report.py runs/frontier/*/compare`.

RUN_DIRs are folders of nas.compare; the name of the folder that holds one is its budget. OUT gets frontier.csv, a line
for each training, and frontier.png. Prints the table: word perplexity on test, and in brackets how far the searched
network is from it, with the interval and p of Dunnett's test.
"""

import argparse
import sys
from pathlib import Path

from matplotlib.ticker import LogLocator, NullLocator

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row
from nas.comparison.claims import describe, read_claims
from nas.comparison.results import NetworkResult, choose_metric, read_results
from nas.core.errors import run_command
from nas.core.files import write_text
from nas.core.pattern import abbreviate
from nas.reporting.comparison_figures import front
from nas.reporting.comparison_report import csv_records, csv_text
from nas.reporting.style import BLUE, GREY, RED, new_figure, save, tidy


def cells(run: Path, results: list[NetworkResult]) -> dict[str, str]:
    """{name: cell of the table}"""
    metric = choose_metric(results)
    claims = {claim["pattern"]: claim for claim in read_claims(run, results)}
    found = {}
    for result in results:
        found[result.name] = metric.format(result.values(metric))
        if claim := claims.get(result.name):
            found[result.name] += f" ({describe(claim['figures'], metric)})"
    return found


def draw(budgets: dict[str, list[NetworkResult]], path: Path) -> None:
    """Word perplexity over time: the searched networks, and the front of all others."""
    figure, axes = new_figure(7.5, 4.8)
    metric = choose_metric([result for results in budgets.values() for result in results])
    others = []
    for results in budgets.values():
        for result in results:
            point = result.latency, float(result.values(metric).mean())
            searched = result.name == "searched"
            size = 8 if searched else 5
            axes.plot(*point, "o", color=RED if searched else GREY, markersize=size, zorder=2 + searched)
            if searched:
                words = f"{result.vocab_size:,}, {abbreviate(result.blocks)}"
                axes.annotate(
                    words, point, xytext=(0, -18), textcoords="offset points", color=RED, fontsize=9, ha="center"
                )
            else:
                others.append(result)
    points = [(result.latency, float(result.values(metric).mean())) for result in others]
    axes.step(*zip(*front(points), strict=True), where="post", color=BLUE, linewidth=1, linestyle=":", zorder=1)
    axes.set_yscale("log")
    axes.margins(0.1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="inference, ms for 1,000 bytes of text", ylabel=f"{metric.name} on test")
    axes.set_title("red: found by the search; grey: opponents, and their front", loc="left", fontsize=9)
    tidy(axes)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="of nas.compare")
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="folder of the files")
    arguments = parser.parse_args()
    runs = {run.resolve().parent.name: run for run in arguments.runs}
    budgets = {budget: read_results(run) for budget, run in runs.items()}
    tables = {budget: cells(run, budgets[budget]) for budget, run in runs.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    print_row("network", *budgets, header=True)
    for name in names:
        print_row(name, *(table.get(name) for table in tables.values()))
    records = [{"budget": budget} | record for budget, rs in budgets.items() for r in rs for record in csv_records(r)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out / "frontier.csv", csv_text(records))
    draw(budgets, arguments.out / "frontier.png")


if __name__ == "__main__":
    run_command(main)
