"""Perplexity, and readers of metrics.jsonl and pi.jsonl."""

import math
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import read_jsonl, read_yaml

METRICS, PI, PATHS = "metrics.jsonl", "pi.jsonl", "paths.jsonl"


def perplexity(nll: float) -> float:
    """exp(nll), where nll is in nats per token or per word; infinity on overflow."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def read_metrics(run: Path) -> list[dict]:
    """Lines of metrics.jsonl; empty if the run has not logged any."""
    return read_jsonl(run / METRICS) if (run / METRICS).is_file() else []


def read_pi(run: Path) -> list[dict]:
    """Lines of pi.jsonl. Raises InputError if the folder holds no search run, or a line is damaged."""
    lines = read_jsonl(run / PI) if (run / PI).is_file() else []
    if not lines:
        searching = (run / "config.yaml").is_file() and read_yaml(run / "config.yaml").get("stage") == "search"
        advice = "continue this search with --resume" if searching else "give the --run folder of a search"
        raise InputError(f"{run} holds no {PI} with a logged step; {advice}")
    for number, line in enumerate(lines, start=1):
        if not is_pi_line(line, lines[0]):
            raise InputError(
                f"{run / PI} is damaged: line {number} lacks step, temperature, operations or a pi of the same shape"
            )
    return lines


def is_pi_line(line, first) -> bool:
    """Whether a line has all keys, and its probabilities have the shape [blocks, operations] of the first line."""
    try:
        shape, names = (len(first["pi"]), len(first["operations"])), line["operations"]
        whole = {"step", "temperature"} <= line.keys() and names == first["operations"]
        tables = line["pi"], line.get("pi_within_budget", line["pi"])
        return whole and 0 not in shape and all((len(pi), *{len(row) for row in pi}) == shape for pi in tables)
    except (KeyError, TypeError):
        return False
