"""The files that report a comparison: a table as csv and Markdown, the figure and the claims."""

import csv
import io
from pathlib import Path

import numpy as np

from nas.comparison.claims import CLAIMS_FORMAT, make_claims, training_warning
from nas.comparison.results import WORD_PERPLEXITY, PatternResult, choose_metric, mean_and_standard_error, read_results
from nas.core.files import write_text, write_yaml

VERDICT_NOTE = (
    "yes and no are shown by Welch's t-test with p < 0.05, or need no test. not shown: p is larger, or no test is "
    "possible. ± is the standard error over seeds."
)


def write_report(run: Path) -> None:
    """Write comparison.csv, .md and .png and claims.yaml to the run folder of a comparison, and print the .md."""
    from nas.reporting.comparison_figures import comparison_plot  # imported here because matplotlib is slow to import

    results = read_results(run)
    claims = make_claims(results)
    header, rows = table(results)
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    notes = filter(None, (training_warning(results), VERDICT_NOTE))
    evidence = [f"- {c['verdict']}: {c['pattern']}, {c['claim']}. {c['sentence']}" for c in claims]
    text = "\n".join([*lines, "", *(f"{note}\n" for note in notes), *evidence]) + "\n"
    write_text(run / "comparison.csv", csv_text(results))
    write_text(run / "comparison.md", text)
    comparison_plot(results, run / "comparison.png")
    write_yaml(run / "claims.yaml", {"format": CLAIMS_FORMAT, "claims": claims})
    print(text)
    print(f"written to {run}: comparison.csv, .md, .png and claims.yaml")


def csv_record(result: PatternResult) -> dict:
    """A row of comparison.csv. Losses are in nats per token, on test if the name does not say valid."""
    first = result.runs[0]
    nll, nll_error = mean_and_standard_error([run["test"]["nll_per_token"] for run in result.runs])
    comparable = all(run["test"]["word_perplexity_comparable"] for run in result.runs)
    perplexity = mean_and_standard_error(result.values(WORD_PERPLEXITY)) if comparable else (None, None)
    return {
        "name": result.contender.name,
        "blocks": result.contender.key,
        "seeds": len(result.runs),
        "parameters": first["parameters"],
        "flops_per_token": first["flops_per_token"],
        "latency_ms": result.latency["median_ms"],
        "latency_ratio": result.latency_ratio,
        "nll_mean": nll,
        "nll_se": nll_error,
        "valid_nll_mean": float(np.mean([run["valid"]["nll_per_token"] for run in result.runs])),
        "word_perplexity_mean": perplexity[0],
        "word_perplexity_se": perplexity[1],
        "search_hours": result.search_hours,
        "train_hours": result.train_hours,
    }


def csv_text(results: list[PatternResult]) -> str:
    """One line per contender. Unknown values are empty."""
    text, records = io.StringIO(), list(map(csv_record, results))
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in record.items()})
    return text.getvalue()


def table(results: list[PatternResult]) -> tuple[list[str], list[list[str]]]:
    """The header, and the cells of each result: its name, its blocks, and figures."""
    metric = choose_metric(results)
    header = ["pattern", "blocks", f"{metric.name}, test", "valid", "seeds", "latency ms", "of interleaved"]
    rows = [
        [
            result.contender.name,
            result.contender.key,
            metric.format(result.values(metric)),
            metric.format(result.values(metric, "valid")),
            str(len(result.runs)),
            f"{result.latency['median_ms']:.2f}",
            f"{result.latency_ratio:.3f}",
            f"{result.runs[0]['parameters']:,}",
            f"{result.runs[0]['flops_per_token']:,.0f}",
            f"{result.search_hours:.2f} + {result.train_hours:.2f}",
        ]
        for result in results
    ]
    return [*header, "parameters", "FLOPs per token", "hours: search + train"], rows
