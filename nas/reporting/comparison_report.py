"""The files that report a comparison: a line for each run as csv, a table as Markdown, the figure and the claims."""

import csv
import io
from pathlib import Path

import numpy as np

from nas.comparison.results import CLAIMS_FORMAT, NetworkResult, choose_metric, notices, read_claims, read_results
from nas.core.files import write_text, write_yaml
from nas.core.pattern import abbreviate
from nas.reporting.figures import comparison_plot

VERDICT_NOTE = (
    "better, worse: p < 0.05 by Dunnett's test, whose intervals hold for all comparisons at once. "
    "no worse: the interval ends below the margin. ± is the standard error over seeds."
)


def write_report(run: Path) -> None:
    """Write comparison.csv, .md and .png and claims.yaml to the run folder of a comparison, and print the .md."""
    results = read_results(run)
    claims = read_claims(run, results)
    rows = table(results)
    cells = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    evidence = [f"- {claim['sentence']}" for claim in claims]
    text = "\n".join([*lines, "", *(f"{note}\n" for note in (*notices(results), VERDICT_NOTE)), *evidence]) + "\n"
    write_text(run / "comparison.csv", csv_text([record for result in results for record in csv_records(result)]))
    write_text(run / "comparison.md", text)
    comparison_plot(results, run / "comparison.png")
    write_yaml(run / "claims.yaml", {"format": CLAIMS_FORMAT, "claims": claims})
    print(text)
    print(f"written to {run}: comparison.csv, .md, .png and claims.yaml")


def csv_records(result: NetworkResult) -> list[dict]:
    """The rows of a contender in comparison.csv, one for each run. Incomparable word perplexities are empty."""
    records = []
    for run, folder in zip(result.runs, result.folders, strict=True):
        record = {"name": result.name, "network": result.key, "seed": folder.name.rpartition("-")[2]}
        for split in ("valid", "test"):
            words = run[split]["word_perplexity"] if run[split]["word_perplexity_comparable"] else None
            record |= {f"{split}_word_perplexity": words, f"{split}_bits_per_byte": run[split]["bits_per_byte"]}
        record |= {"parameters": run["parameters"], "flops_per_token": run["flops_per_token"]}
        record |= {"ms_per_1000_bytes": result.latency, "latency_ratio": result.ratio}
        alone = run["network"] and run["network"]["test"]["bits_per_byte"]
        records.append(record | {"network_test_bits_per_byte": alone, "train_hours": run["wall_time_s"] / 3600})
    return records


def csv_text(records: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in one.items()} for one in records)
    return text.getvalue()


def table(results: list[NetworkResult]) -> list[dict[str, str]]:
    """The row of each result, by the names of the columns."""
    metric, rows = choose_metric(results), []
    for result in results:
        alone, hours = result.network_values(metric), [run["wall_time_s"] / 3600 for run in result.runs]
        row = {
            "name": result.name,
            "blocks": abbreviate(result.blocks),
            f"{metric.name}, test": metric.format(result.values(metric)),
            "valid": metric.format(result.values(metric, "valid")),
            "network alone, test": "" if alone is None else metric.format(alone),
            "seeds": str(len(result.runs)),
            "ms for 1,000 bytes": f"{result.latency:.3g}",
            f"of {results[0].name}": f"{result.ratio:.3f}",
            "vocabulary": f"{result.vocab_size:,}",
            "parameters": f"{result.runs[0]['parameters']:,}",
            "hours of a training": f"{np.mean(hours):.2f}",
        }
        rows.append(row)
    return rows
