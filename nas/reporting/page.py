"""An HTML page of run folders, with a section for each search, training and comparison. Its template is report.html."""

import base64
import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path

from nas.comparison.claims import make_claims, training_warning
from nas.comparison.results import CONTENDERS, choose_metric, read_results, sort_by_loss
from nas.comparison.spec import SEARCHED, SETTINGS
from nas.core.config import flat_config
from nas.core.config_loading import derived_defaults
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_text
from nas.core.metrics import read_metrics, read_pi
from nas.core.pattern import LETTERS, read_pattern
from nas.core.provenance import git_commit
from nas.core.run_folder import LATENCY, MAY_CHANGE, OUTCOME, PATTERN, RESULTS
from nas.costs.cost_table import latency_report, read_costs
from nas.derivation.pattern_record import Choice, pattern_record
from nas.derivation.runs import current_pattern, read_run
from nas.reporting.comparison_report import VERDICT_NOTE, table_cells, table_header

TEMPLATE = Path(__file__).with_name("report.html")
MEDIA_TYPES = {".gif": "image/gif", ".svg": "image/svg+xml"}


def data_uri(figure: Callable, *content, suffix: str = ".svg") -> str:
    """The file that figure(*content, path) writes, as a data URI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"figure{suffix}"
        figure(*content, path)
        return f"data:{MEDIA_TYPES[suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def origin(run: Path) -> dict:
    """How to repeat a run: its commands, its device and versions, and the options that are not defaults."""
    record = read_yaml(run / "provenance.yaml")
    own = flat_config(read_yaml(run / "config.yaml"))
    facts = {
        "device": f"{record['processor']}, {record['threads']} threads, {record['device']}",
        "versions": ", ".join([f"python {record['python']}", *(f"{k} {v}" for k, v in record["packages"].items())]),
        "seed": record["seed"],
        "vocabulary": f"{record['vocab_size']:,}",
        **{f"SHA-256 of {split}": digest for split, digest in record["data_sha256"].items()},
    }
    commit, _, changed = (record["git_commit"] or "").partition("-")
    if changed:
        facts["note"] = "the source files had uncommitted changes"
    return {
        "repeat": [*([f"git checkout {commit}"] if commit else []), f"python {record['command']}"],
        "facts": facts,
        "options": changed_options(own),
    }


def changed_options(own: dict) -> dict:
    """The options of a run, as flat_config returns them, that differ from their defaults and from derived values."""
    defaults = flat_config({}) | derived_defaults(own)
    return {
        key: value
        for key, value in own.items()
        if value not in (None, defaults[key]) and key not in MAY_CHANGE  # train.epochs makes train.steps null
    }


def cost_table(run: Path, blocks: int, operations: list[str]) -> dict | None:
    """The run's latency table, or None if it has none."""
    path = run / LATENCY
    if not path.exists():
        return None
    table = read_costs(path, operations)
    conditions = ", ".join(f"{key} {value}" for key, value in table.holds_for.items())
    return {"unit": table.unit, "rows": table.rows(blocks), "holds_for": conditions}


def curves_uri(run: Path) -> str | None:
    """The learning curves, or None if no metrics have been logged."""
    from nas.reporting.curves import learning_curves

    metrics = read_metrics(run)
    return data_uri(learning_curves, metrics) if metrics else None


def search_section(run: Path) -> dict:
    """The section of a search, with the pattern of current_pattern()."""
    from nas.reporting.pi_figures import animate, pi_history, pi_over_time

    search, history, outcome = read_run(run), pi_history(read_pi(run)), run / OUTCOME
    derived = run / PATTERN
    if derived.exists():
        pattern = read_pattern(derived)
    else:
        pattern = pattern_record(Choice(current_pattern(run), search.budget, [search]), search.costs)
    summary = f"Step {search.step:,} of {search.of_steps:,}."
    if outcome.exists():
        summary += f" SuperNet on valid: perplexity {read_yaml(outcome)['valid']['perplexity']:.2f}."
    return {
        "name": run.name,
        "pattern": pattern,
        "summary": summary,
        "gif": data_uri(animate, history, suffix=".gif") if len(history) > 1 else None,
        "over_time": data_uri(pi_over_time, history),
        "curves": curves_uri(run),
        "table": cost_table(run, len(pattern["blocks"]), search.operations),
        "origin": origin(run),
    }


def training_section(run: Path) -> dict:
    """The section of one training."""
    rows, facts = [], {}
    if (run / RESULTS).exists():
        results = read_yaml(run / RESULTS)
        for split in ("valid", "test"):
            r = results[split]
            words = f"{r['word_perplexity']:.2f}" if r["word_perplexity_comparable"] else "not comparable"
            cells = [f"{r['perplexity']:.2f}", words, f"{r['bits_per_byte']:.4f}", f"{r['nll_per_token']:.4f}"]
            rows.append([split, *cells, f"{r['tokens']:,}"])
        ratio = f"{results['flops_ratio_to_interleaved']:.2f} of the interleaved pattern's"
        facts = {
            "parameters": f"{results['parameters']:,}",
            "FLOPs per token": f"{results['flops_per_token']:,.0f}, {ratio}",
            "latency": " ".join(latency_report(results["latency"])),
            "training": f"{results['train_tokens']:,} tokens in {results['wall_time_s']:,.0f} s",
        }
    return {
        "blocks": read_yaml(run / "config.yaml")["pattern"],
        "rows": rows,
        "facts": facts,
        "curves": curves_uri(run),
        "origin": origin(run),
    }


def comparison_section(run: Path) -> dict:
    """The section of a comparison: its claims, figures and table, and then its searches."""
    from nas.reporting.comparison_figures import comparison_plot
    from nas.reporting.curves import comparison_curves

    if not (run / CONTENDERS).exists():
        raise InputError(f"{run} holds no finished run that python -m nas.compare has reported")
    results = sort_by_loss(read_results(run))
    metric, derivations = choose_metric(results), list(map(derivation, sorted(run.glob(f"patterns/{SEARCHED}*.yaml"))))
    return {
        "warning": training_warning(results),
        "claims": make_claims(results),
        "plot": data_uri(comparison_plot, results),
        "header": table_header(metric),
        "rows": [(result.contender, table_cells(result, metric)) for result in results],
        "curves": data_uri(comparison_curves, results),
        "settings": (run / SETTINGS).read_text(encoding="utf-8"),
        "derivations": derivations,
        "table": cost_table(run, len(derivations[0][1]["blocks"]), []) if derivations else None,
        "searches": [search_section(path.parent) for path in sorted(run.glob("search-*/pi.jsonl"))],
        "origin": origin(run),
    }


def derivation(file: Path) -> tuple[str, dict, str]:
    """(name, content of the file, how it was derived) of a searched pattern."""
    content = read_pattern(file)
    origin = content["derived_from"]
    text = ""
    if "latency_budget" in origin:
        text = f"within {origin['latency_budget']:g} of the interleaved pattern's cost; "
    if "candidates" in origin:
        text += f"the best candidate {'after trials' if 'trials' in origin else 'by shared weights'} is "
        text += f"{origin['candidates'][0]['names'][0]!r}; "
    undecided = sum(block["undecided"] for block in content["confidence"])
    return file.stem, content, f"{text}pi leaves {undecided} blocks undecided"


SECTIONS = {"search": search_section, "retrain": training_section, "compare": comparison_section}


def read_stage(run: Path) -> str:
    """The stage of a run, a key of SECTIONS. Raises InputError if the folder holds no run."""
    if not (run / "config.yaml").is_file() or not (run / "provenance.yaml").is_file():
        raise InputError(f"{run} is not a run folder: give the --run folder of search.py, retrain.py or nas.compare")
    stage = read_yaml(run / "config.yaml").get("stage")
    if stage not in SECTIONS:
        raise InputError(f"{run / 'config.yaml'} is damaged: its stage is {stage!r}, not one of {', '.join(SECTIONS)}")
    return stage


def write_page(runs: list[Path], out: Path, title: str) -> None:
    """Write the page of some runs. Raises InputError, and writes nothing, if a folder holds no run or a damaged one."""
    import jinja2

    from nas.reporting.style import COLOURS

    stages = [read_stage(run) for run in runs]
    sections = [{"stage": s, "folder": str(run), **SECTIONS[s](run)} for run, s in zip(runs, stages, strict=True)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        runs=sections,
        colours=COLOURS,
        letters=LETTERS,
        verdict_note=VERDICT_NOTE,
        written=datetime.date.today().isoformat(),
        commit=git_commit(),
    )
    write_text(out, page)
