"""nas.reporting.page."""

import base64
import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path

from nas.comparison.claims import make_claims
from nas.comparison.results import best_first, quality_of, read_rows, table_cells, table_heads
from nas.comparison.spec import MATCHED, SEARCHED, UNMATCHED, contenders_file, pattern_file, settings_file
from nas.core.config import default_of, flat_config, options
from nas.core.errors import InputError
from nas.core.files import read_jsonl, read_yaml, write_text
from nas.core.metrics import METRICS, read_pi
from nas.core.pattern import LETTERS, read_pattern
from nas.core.provenance import git_commit
from nas.core.run_folder import MAY_CHANGE, OUTCOME, RESULTS
from nas.costs.table import latency_report, read_costs
from nas.derivation.pattern_record import Choice, pattern_record
from nas.derivation.runs import read_run

TEMPLATE = Path(__file__).with_name("report.html")


MEDIA = {".png": "image/png", ".gif": "image/gif", ".svg": "image/svg+xml"}


def drawn(picture: Callable, *content, suffix: str = ".svg") -> str:
    """What one of nas.figures draws to a file, as a data URI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"picture{suffix}"
        picture(*content, path)
        return f"data:{MEDIA[suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def origin(run: Path) -> dict:
    """How to repeat a run: commands, what it ran on, and the options that are not the defaults."""
    about = read_yaml(run / "provenance.yaml")
    defaults, own = {key: default_of(item) for key, item in options()}, flat_config(read_yaml(run / "config.yaml"))
    facts = {
        "machine": f"{about['processor']}, {about['threads']} threads, {about['device']}",
        "versions": ", ".join([f"python {about['python']}", *(f"{k} {v}" for k, v in about["packages"].items())]),
        "seed": about["seed"],
        "vocabulary": f"{about['vocab_size']:,}",
        **{f"SHA-256 of {split}": digest for split, digest in about["data_sha256"].items()},
    }
    commit, _, changed = (about["git_commit"] or "").partition("-")
    if changed:
        facts["note"] = "the program had been changed since that commit"
    return {
        "repeat": [*([f"git checkout {commit}"] if commit else []), f"python {about['command']}"],
        "facts": facts,
        "options": {k: value for k, value in own.items() if value != defaults[k] and k not in MAY_CHANGE},
    }


def cost_table(run: Path, blocks: int, operations: list[str]) -> dict | None:
    """What operations cost, in milliseconds, where the folder has a table of it."""
    path = run / "latency.yaml"
    if not path.exists():
        return None
    table = read_costs(path, operations)
    holds = ", ".join(f"{key} {value}" for key, value in table.holds_for.items())
    return {"unit": table.unit, "rows": table.rows(blocks), "holds_for": holds}


def curves(run: Path) -> str | None:
    """Learning curves, where a line of metrics has been logged."""
    from nas.reporting import comparison_figures as figures

    metrics = read_jsonl(run / METRICS) if (run / METRICS).exists() else []
    return drawn(figures.learning_curves, metrics) if metrics else None


def about_search(run: Path) -> dict:
    """What the page shows of a search; its pattern is that of pattern.yaml, or else of argmax."""
    from nas.reporting import comparison_figures as figures

    search, history = read_run(run), read_pi(run)
    path, outcome = search.pi.argmax(axis=1).tolist(), run / OUTCOME
    pattern = (
        read_pattern(run / "pattern.yaml")
        if (run / "pattern.yaml").exists()
        else pattern_record(Choice(path), [search], "argmax")
    )
    valid = (
        f"; SuperNet on valid: perplexity {read_yaml(outcome)['valid']['perplexity']:.2f}" if outcome.exists() else ""
    )
    return {
        "name": run.name,
        "pattern": pattern,
        "summary": f"Step {search.step:,} of {search.of_steps:,}{valid}.",
        "gif": drawn(figures.animate, history, suffix=".gif") if len(history) > 1 else None,
        "over_time": drawn(figures.pi_over_time, history),
        "curves": curves(run),
        "table": cost_table(run, len(path), search.operations),
        "origin": origin(run),
    }


def about_training(run: Path) -> dict:
    """What the page shows of one pattern's training."""

    results, rows, facts = run / RESULTS, [], {}
    if results.exists():
        content = read_yaml(results)
        for split in ("valid", "test"):
            about = content[split]
            words = f"{about['word_perplexity']:.2f}" if about["word_perplexity_comparable"] else "does not compare"
            figures_of = [f"{about['perplexity']:.2f}", words, f"{about['bits_per_byte']:.4f}"]
            rows.append([split, *figures_of, f"{about['nll_per_token']:.4f}", f"{about['tokens']:,}"])
        facts = {
            "parameters": f"{content['parameters']:,}",
            "FLOPs per token": f"{content['flops_per_token']:,.0f}, "
            f"{content['flops_ratio_to_interleaved']:.2f} of the interleaved pattern's",
            "latency": " ".join(latency_report(content["latency"])),
            "training": f"{content['train_tokens']:,} tokens in {content['wall_time_s']:,.0f} s",
        }
    return {
        "blocks": read_yaml(run / "config.yaml")["pattern"],
        "rows": rows,
        "facts": facts,
        "curves": curves(run),
        "origin": origin(run),
    }


def about_comparison(run: Path) -> dict:
    """What the page shows of a comparison: claims, plot, table and curves, then its searches."""
    from nas.reporting import comparison_figures as figures

    parts = []
    for mark, title in {UNMATCHED: "Under one recipe", MATCHED: "At equal parameters"}.items():
        if not contenders_file(run, mark).exists():
            continue
        rows = best_first(read_rows(contenders_file(run, mark)))
        quality = quality_of(rows)
        parts.append(
            {
                "title": title,
                "claims": make_claims(rows),
                "plot": drawn(figures.comparison_plot, rows),
                "heads": table_heads(rows),
                "rows": [(row.contender, table_cells(row, quality)) for row in rows],
                "curves": drawn(
                    figures.comparison_curves,
                    rows,
                    {row.contender.name: [read_jsonl(folder / METRICS) for folder in row.folders] for row in rows},
                ),
            }
        )
    if not parts:
        raise InputError(f"{run} holds no finished run that python -m nas.compare has reported")
    searches, settings, file = sorted(run.glob("search-*/pi.jsonl")), settings_file(run), pattern_file(run, SEARCHED)
    pattern = read_pattern(file) if file.exists() else None
    return {
        "parts": parts,
        "settings": settings.read_text(encoding="utf-8") if settings.exists() else None,
        "found": [found_words(path) for path in sorted((run / "patterns").glob(f"{SEARCHED}*.yaml"))],
        "pattern": pattern,
        "table": cost_table(run, len(pattern["blocks"]), []) if pattern else None,
        "searches": [about_search(path.parent) for path in searches],
        "origin": origin(run),
    }


def found_words(path: Path) -> tuple[str, list[str], str]:
    """(name, blocks, how it was found) of a searched pattern."""
    content = read_pattern(path)
    origin = content["derived_from"]
    words = f"derive.py --method {origin['method']}"
    if "latency_budget" in origin:
        words += f" within {origin['latency_budget']:g} of the interleaved pattern's cost"
    how = origin.get("evolution", {})
    if how:
        words += f"; {how['judged']} patterns judged"
    if how.get("trials"):
        tried = sorted(how["trials"].items(), key=lambda item: item[1])
        words += f", of which trained for {how['trial_steps']} steps: " + ", ".join(
            f"{k} {nll:.4f}" for k, nll in tried
        )
    undecided = sum(block["undecided"] for block in content["confidence"])
    return path.stem, content["blocks"], f"{words}; {undecided} blocks undecided by pi"


STAGES = {"search": about_search, "retrain": about_training, "compare": about_comparison}


def read_stage(run: Path) -> str:
    """Raises InputError where a folder holds no run."""
    if not (run / "config.yaml").is_file() or not (run / "provenance.yaml").is_file():
        raise InputError(f"{run} is no run folder: give the --run folder of search.py, retrain.py or nas.compare")
    stage = read_yaml(run / "config.yaml").get("stage")
    if stage not in STAGES:
        raise InputError(f"{run / 'config.yaml'} is damaged: its stage is {stage!r}, not one of {', '.join(STAGES)}")
    return stage


def write_page(runs: list[Path], out: Path, title: str) -> None:
    """Raises InputError where a folder holds no run, or a damaged one, before anything is written."""
    import jinja2

    from nas.reporting.pi_figures import COLOURS

    stages = [read_stage(run) for run in runs]
    sections = [{"stage": s, "folder": str(run), **STAGES[s](run)} for run, s in zip(runs, stages, strict=True)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        runs=sections,
        colours=COLOURS,
        letters=LETTERS,
        written=datetime.date.today().isoformat(),
        commit=git_commit(),
    )
    write_text(out, page)
