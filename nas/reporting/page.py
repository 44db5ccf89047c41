"""An HTML page of run folders, with a section for each search, training and comparison. Its template is report.html."""

import base64
import datetime
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

import jinja2

from models.operations.registry import OPERATIONS
from nas.comparison.results import notices, read_claims, read_results
from nas.comparison.spec import SETTINGS
from nas.core import run_folder
from nas.core.config import CANDIDATES, LEARNING_RATES, RESUME, flat_config, marked
from nas.core.errors import InputError
from nas.core.files import read_jsonl, read_yaml, write_text
from nas.core.outcome import read_pi, size_line
from nas.core.pattern import abbreviate, read_pattern, unit_of
from nas.core.run_folder import PROVENANCE, git_commit
from nas.costs.cost_table import MILLISECONDS, cost_rows, latency_report
from nas.derivation.runs import current_pattern, read_run
from nas.reporting import figures
from nas.reporting.comparison_report import VERDICT_NOTE, table
from nas.search.space import read_table

TEMPLATE = Path(__file__).with_name("report.html")


def data_uri(figure: Callable, *content, kind: str = "svg+xml") -> str:
    """The file that figure(*content, path) writes, as a data URI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figure").with_suffix(f".{kind[:3]}")
        figure(*content, path)
        return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def origin(run: Path) -> dict:
    """How to repeat a run: its commands, its device and versions, and the options that are not defaults."""
    record = read_yaml(run / PROVENANCE)
    packages = {"python": record["python"], **record["packages"]}
    threads = f"{record['threads']} thread{'s' if record['threads'] != 1 else ''}"
    facts = {
        "device": f"{record['processor']}, {threads}, {record['device']}",
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "vocabulary": f"{record['vocab_size']:,}",
        **{f"SHA-256 of {split}": digest for split, digest in record["data_sha256"].items()},
    }
    commit, _, changed = (record["git_commit"] or "").partition("-")
    changes = "    # and changes that were not committed" if changed else ""
    repeat = [f"git checkout {commit}{changes}"] if commit else []
    repeat.append(f"python {command_for_new_run(run, record['command'])}")
    options = changed_options(flat_config(read_yaml(run / run_folder.CONFIG)))
    return {"repeat": repeat, "facts": facts, "options": options}


def command_for_new_run(run: Path, command: str) -> str:
    """The command that made a run, for a new folder. A run of nas.run is repeated as a whole."""
    if (run.parent / run_folder.PLAN).exists():
        return f"-m nas.run {shlex.quote(str(run.parent / run_folder.PLAN))} --run NEW_FOLDER"
    words = [word for word in shlex.split(command) if word != "--resume"]
    if "--run" in words:
        words[words.index("--run") + 1] = "NEW_FOLDER"
    return shlex.join(words)


def changed_options(own: dict) -> dict:
    """The options of a run that differ from their defaults, and values in place of auto. own: of flat_config()."""
    defaults = flat_config({})
    defaults["train.lr"] = LEARNING_RATES[own["train.optimizer"]]
    defaults["search.operations"] = list(CANDIDATES[own["search.method"]])
    given = {key: value for key, value in own.items() if value is not None}  # train.epochs makes train.steps null
    return {key: value for key, value in given.items() if value != defaults[key] and key not in marked(RESUME)}


def read_optional(file: Path) -> dict | None:
    return read_yaml(file) if file.exists() else None


def curves_uri(run: Path) -> str | None:
    """The learning curves, or None if no metrics have been logged."""
    metrics = read_jsonl(run / run_folder.METRICS)
    return data_uri(figures.learning_curves, metrics) if metrics else None


def search_section(run: Path) -> dict:
    """The section of a search, with the pattern of current_pattern()."""
    search, history = read_run(run), figures.pi_history(read_pi(run))
    by_trials, pattern, blocks = (run / run_folder.CHOICE).exists(), run / run_folder.PATTERN, current_pattern(run)
    summary = f"Step {search.step:,} of {search.of_steps:,}."
    if outcome := read_optional(run / run_folder.OUTCOME):
        what = "The trial of the chosen network" if by_trials else "SuperNet"
        summary += f" {what} on valid: {outcome['valid']['bits_per_byte']:.4f} bits per byte."
    costs = None
    if (file := run / run_folder.LATENCY).exists():
        table = read_table(file, search.options, search.operations)
        costs = {"unit": table.unit, "rows": cost_rows(table, len(search.pi)), "holds_for": table.holds_for}
    return {
        "name": run.name,
        "blocks": blocks,
        "trials": by_trials,
        "shown": [blocks, search.options["search.operations"]],
        "confidence": read_pattern(pattern).get("confidence") if pattern.exists() else None,
        "summary": summary,
        "gif": data_uri(figures.animate, history, kind="gif") if len(history) > 1 else None,
        "over_time": data_uri(figures.pi_over_time, history),
        "curves": curves_uri(run),
        "table": costs,
    }


def training_section(run: Path) -> dict:
    results, blocks = read_optional(run / run_folder.RESULTS), read_yaml(run / run_folder.CONFIG)["pattern"]
    return {
        "blocks": blocks,
        "shown": [blocks],
        "results": results,
        "latency": " ".join(latency_report(results["latency"])) if results else "",
        **mixture_section(results, read_optional(run.parent / run_folder.NO_NETWORK / run_folder.RESULTS)),
        "curves": curves_uri(run),
    }


def mixture_section(results: dict | None, counted: dict | None) -> dict:
    """The coloured tokens, and the figure of what each part gives; None and no figure without a mixture.

    counted: the content of results.yaml of cache and counts alone beside a training of nas.run.
    """
    if not results or not results["mixture"]:
        return {"coloured": None}
    colours, tokens = figures.PART_COLOURS, []
    for text, part, p in results["mixture"]["sample"]:
        strength = round(255 * (0.25 + 0.75 * p))  # of the colour
        tokens.append((text, f"{colours[part.split()[0]]}{strength:02x}"))
    used = {part.split()[0] for part in results["mixture"]["parts"]}
    coloured = {"tokens": tokens, "colours": {name: colour for name, colour in colours.items() if name in used}}
    gains = {"gains": data_uri(figures.gains_figure, results, counted)} if results["network"] else {}
    return {"coloured": coloured, **gains}


def comparison_section(run: Path) -> dict:
    results = read_results(run)
    rows = table(results)
    return {
        "warnings": notices(results),
        "claims": read_claims(run, results),
        "shown": [result.blocks for result in results],
        "plot": data_uri(figures.comparison_plot, results),
        "header": list(rows[0]),
        "rows": [(result, [*row.values()][2:]) for result, row in zip(results, rows, strict=True)],
        "settings": (run / SETTINGS).read_text(encoding="utf-8"),
    }


SECTIONS = {"search": search_section, "retrain": training_section, "compare": comparison_section}


def trained_networks(runs: list[Path], reference_cost: float) -> list[tuple[str, float, float]]:
    """The networks of the trainings among these runs, for networks_figure().

    The devices of a search and of later stages may have other speeds. So the cost of a network of nas.run is
    reference_cost times the ratio of its time to that of the reference in the same rounds.
    """
    trained = []
    for run in (run for run in runs if (run / run_folder.RESULTS).exists()):
        found, summary = read_yaml(run / run_folder.RESULTS), run.parent / run_folder.SUMMARY
        cost = found["latency"]["ms_per_1000_bytes"]
        if run.name in (run_folder.FOUND, run_folder.USUAL) and summary.exists():
            cost = read_yaml(summary)[run.name]["time_ratio_to_reference"] * reference_cost
        if found["network"]:
            name = f"{run.name}: {abbreviate(found['pattern'])}"
            trained.append((name, cost, found["valid"]["bits_per_byte"]))
    return trained


def section(run: Path, runs: list[Path]) -> dict:
    """The section of a run. Raises InputError if the folder holds no run, or a damaged one. runs: all of the page."""
    if not (run / run_folder.CONFIG).is_file() or not (run / PROVENANCE).is_file():
        raise InputError(f"{run} is not a run folder: give the --run folder of search.py, retrain.py or nas.compare")
    stage = read_yaml(run / run_folder.CONFIG)["stage"]
    content = {"stage": stage, "folder": str(run), "origin": origin(run), **SECTIONS[stage](run)}
    if choice := read_optional(run / run_folder.CHOICE):
        content |= {"size": size_line(choice)} if "size" in choice else {}
        timed = choice["unit"].startswith(MILLISECONDS)
        trained = trained_networks(runs, choice["reference_cost"]) if timed else []
        content["networks"] = data_uri(figures.networks_figure, choice, trained)
    return content


def write_page(runs: list[Path], out: Path, title: str) -> None:
    """Write the page of some runs. Raises InputError, and writes nothing, if a folder holds no run or a damaged one.

    The folder of a finished nas.run, if it is the first, stands for its search and trainings, and its answer is shown.
    """
    whole = runs[0] if (runs[0] / run_folder.SUMMARY).exists() else None
    if whole:
        runs = [whole / run_folder.SEARCH, whole / run_folder.FOUND, whole / run_folder.USUAL, *runs[1:]]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    sections = [section(run, runs) for run in runs]
    used = {block.split()[0] for one in sections for blocks in one["shown"] for block in blocks}
    answer = None
    if whole:  # two pictures move from the sections to the answer
        pictures = {"networks": sections[0].pop("networks"), "gains": sections[1].pop("gains", None)}
        answer = read_yaml(whole / run_folder.SUMMARY) | pictures
    content = {"title": title, "answer": answer, "runs": sections, "verdict_note": VERDICT_NOTE, "unit_of": unit_of}
    content |= {"operations": [name for name in OPERATIONS if name in used], "colours_of": figures.colours_of}
    content |= {"written": datetime.date.today().isoformat(), "commit": git_commit()}
    write_text(out, environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(content))
