"""The found network of nas.run beside the usual one and no network: trainings, summary.yaml, and the last lines."""

import math
from dataclasses import replace
from pathlib import Path

from nas.core.config import Config
from nas.core.config_loading import REPORT, load_config, simplify
from nas.core.errors import RunError
from nas.core.files import read_yaml, write_yaml
from nas.core.outcome import mixture_ms, predictor_ms
from nas.core.pattern import FORMAT, abbreviate, interleaved
from nas.core.run_folder import (
    CHECKPOINT,
    CHOICE,
    CONFIG,
    FOUND,
    NO_NETWORK,
    PATTERN,
    PLAN,
    RESULTS,
    SEARCH,
    SUMMARY,
    TRIALS,
    USUAL,
    check_text,
    data_digests,
)
from nas.costs.baselines import deepest
from nas.costs.cost_table import TOLERANCE
from nas.costs.measurement import ROUNDS, SECONDS, text_times
from nas.costs.sizes import bytes_beside
from nas.data.corpus import Corpus, prepare
from nas.jobs.engines import open_engine
from nas.jobs.tasks import run_tasks, training_task, unfinished
from nas.mixture.mixture import open_mixture
from nas.retraining.phase import BEST
from nas.search.network_search import COSTS
from nas.search.space import NetworkCosts, with_sizes, within_budget
from nas.search.strategy import EQUAL_LOSS
from nas.search.surrogate import LEAST_LOSS
from nas.training.device import set_up_device
from nas.training.passes import resolve_auto

# Two standard errors of a relative difference of losses, times the root of the tokens: 0.4 for a pair of networks in
# the mixture of WikiText-2 (0.2 to 0.6 for fifteen pairs, by the differences of lines)
NOISE = 0.8
QUALITY = "bits_per_byte", "word_perplexity", "word_perplexity_comparable"


def usual_blocks(folder: Path, plan: Config) -> list[str] | None:
    """The blocks of the deepest interleaved network within the budget; None if there is none."""
    costs = NetworkCosts.read(folder / SEARCH / TRIALS / COSTS)
    limit = read_yaml(folder / SEARCH / CHOICE)["budget"] * costs.reference_cost
    return deepest(interleaved, plan.model.blocks, within_budget(costs.tables[costs.reference[:2]], limit))


def no_network_pattern(config: Config, pieces: int | None = None) -> dict:
    """The content of the pattern file of cache and counts alone. pieces: of another vocabulary."""
    content = {"format": FORMAT, **({"vocab_size": pieces} if pieces else {}), "blocks": []}
    if config.search.size.target and config.mixture.counts:
        own = with_sizes(config, pieces or config.data.vocab_size, config.model.d_model)
        beside = bytes_beside(own, Corpus(prepare(own.data)), has_network=False)
        content["counts_bytes"] = max(1, config.search.size.target - beside)
    return content


def best_without_network(config: Config, vocabularies: set[int]) -> dict:
    """The content of the pattern file of cache and counts alone, in the vocabulary that is the best one on valid.

    vocabularies: their numbers of pieces. Bytes, words, and pieces without a given number have one vocabulary.
    """
    if not config.data.vocab_size:
        return no_network_pattern(config)

    def nll(content: dict) -> float:
        corpus = Corpus(prepare(with_sizes(config, content["vocab_size"], config.model.d_model).data))
        options = replace(config.beside, size=content.get("counts_bytes", config.beside.size))
        mixture = open_mixture(options, corpus, 0)
        return mixture.fit(corpus.tokens("valid"), None, None).sum()

    return min((no_network_pattern(config, pieces) for pieces in sorted(vocabularies)), key=nll)


def train_networks(folder: Path, plan: Config) -> None:
    """Train the found network, from its trial on, and the usual one, side by side if there are cores; count without."""
    check_text(folder / SEARCH / TRIALS, data_digests(Corpus(prepare(plan.data)).meta))
    blocks, tasks = usual_blocks(folder, plan), []
    if not blocks:
        print("NOTICE: no interleaved network of the given sizes is within the budget; the usual one has one block")
    patterns = {FOUND: folder / SEARCH / PATTERN}
    usual = {"format": FORMAT, "blocks": simplify(blocks or interleaved(1), plan, "interleaved")}
    costs = NetworkCosts.read(folder / SEARCH / TRIALS / COSTS)
    if counts := costs.tables[costs.reference[:2]].counts_bytes(plan.mixture.size, blocks or interleaved(1)):
        usual["counts_bytes"] = counts
    patterns[USUAL] = folder / f"{USUAL}.yaml"
    write_yaml(patterns[USUAL], usual)
    if plan.beside.counts:
        patterns[NO_NETWORK] = none = folder / f"{NO_NETWORK}.yaml"
        if not none.exists():
            write_yaml(none, best_without_network(plan, {pieces for pieces, _ in costs.tables}))
    for name, pattern in patterns.items():
        run, log = folder / name, folder / "logs" / f"{name}.txt"
        tasks.append(training_task(name, [pattern, folder / PLAN], run, RESULTS, log))
        if (run / CHECKPOINT).exists() and not (run / BEST).exists():  # retrain.py writes it again
            for file in (run / RESULTS, folder / SUMMARY, folder / REPORT):
                file.unlink(missing_ok=True)
    if not unfinished(tasks):
        return
    print(f"training the {FOUND} and the {USUAL} network", flush=True)
    if failed := run_tasks(tasks, open_engine(plan, set_up_device(plan.seed, plan.train), folder)):
        raise RunError("; ".join(f"the training {name} failed: {why}" for name, why in failed.items()))


def summarize(folder: Path, plan: Config) -> dict:
    """The content of summary.yaml: both networks on test, and their times for a text beside that of the reference.

    All times are from the same rounds; ratios are of a network with what is mixed with it, and the reference is alone.
    use: the found network, unless a usual one in the budget is better on valid, or no network is as good.
    """
    networks, summary, valid = {}, {}, {}
    runtime, corpus = set_up_device(plan.seed, plan.train), Corpus(prepare(plan.data))
    for name in (USUAL, FOUND):  # ratios are to the first one
        results, config = read_yaml(folder / name / RESULTS), load_config(folder / name / CONFIG, [])
        valid[name] = results["valid"]["bits_per_byte"]
        networks[name] = results["pattern"], config, Corpus(prepare(config.data))
        about = {"vocab_size": networks[name][2].vocab_size, "d_model": config.model.d_model}
        about |= {"blocks": results["pattern"], "dropout": config.model.dropout}
        alone = {f"network_{key}": results["network"]["test"][key] for key in QUALITY}
        mixture = {"mixture_ms_per_1000_bytes": mixture_ms(results)}
        summary[name] = about | {key: results["test"][key] for key in QUALITY} | alone | mixture
    if (whole := interleaved(plan.model.blocks)) != networks[USUAL][0]:
        networks["reference"] = whole, resolve_auto(plan, corpus), corpus
    times = text_times(networks, runtime, ROUNDS, SECONDS)
    reference, usual = times.get("reference", times[USUAL])["ratio"], None
    for name, own in summary.items():
        own["ms_per_1000_bytes"] = times[name]["ms_per_1000_bytes"]
        whole = times[name]["ratio"] * (1 + own["mixture_ms_per_1000_bytes"] / own["ms_per_1000_bytes"])
        usual = usual or whole
        own |= {"time_ratio_to_usual": whole / usual, "time_ratio_to_reference": whole / reference}
    better = (1 + EQUAL_LOSS) * valid[USUAL] < valid[FOUND] and usual_blocks(folder, plan)
    summary["use"] = USUAL if better else FOUND
    if (counted := folder / NO_NETWORK / RESULTS).exists():
        results = read_yaml(counted)
        vocabulary = Corpus(prepare(load_config(counted.parent / CONFIG, []).data)).vocab_size
        summary[NO_NETWORK] = {"vocab_size": vocabulary, "ms_per_1000_bytes": predictor_ms(results)}
        summary[NO_NETWORK] |= {key: results["test"][key] for key in QUALITY}
        valid[NO_NETWORK] = results["valid"]["bits_per_byte"]
    noise = NOISE / math.sqrt(results["valid"]["tokens"])
    if NO_NETWORK in valid and valid[NO_NETWORK] <= (1 + max(EQUAL_LOSS, noise)) * valid[summary["use"]]:
        summary["use"] = NO_NETWORK
    return summary | {"valid_bits_per_byte": valid, "valid_noise": noise}


def describe(folder: Path, plan: Config) -> str:
    """The last lines: a table, how both networks differ, notices, and text by the model to use."""
    summary, choice = read_yaml(folder / SUMMARY), read_yaml(folder / SEARCH / CHOICE)
    found, usual = (summary[name] for name in (FOUND, USUAL))
    is_reference, timed = usual["blocks"] == interleaved(plan.model.blocks), choice["unit"].startswith("ms")
    bits, to_reference = change(found["bits_per_byte"], usual["bits_per_byte"]), found["time_ratio_to_reference"]
    alone = change(found["network_bits_per_byte"], usual["network_bits_per_byte"])
    line = f"found against usual{' (the reference)' if is_reference else ''}: {bits:+.1%} bits per byte"
    line += "" if found["bits_per_byte"] == found["network_bits_per_byte"] else f" (networks alone: {alone:+.1%})"
    line += f", at {found['time_ratio_to_usual']:.2f} of its time"
    line += "" if is_reference else f"; {to_reference:.2f} of the reference's time"
    line += f", and the budget is {choice['budget']:.3g}" if timed else ""
    lines = [*aligned([row_of(name, summary[name]) for name in (FOUND, USUAL, NO_NETWORK) if name in summary]), line]
    if table := plan.search.latency.table:
        lines.append(f"NOTICE: the budget counts costs of {table}; the times above are of this device")
    elif timed and to_reference > (1 + TOLERANCE) * choice["budget"]:
        again = f"remove {folder / SUMMARY} and {folder / REPORT}, and repeat the command on an idle machine"
        lines.append(f"NOTICE: the found network takes longer than the budget; to time it again, {again}")
    valid, noise = summary["valid_bits_per_byte"], summary["valid_noise"]
    if unsure := abs(change(valid[FOUND], valid[USUAL])) < noise:
        lines.append(f"NOTICE: on valid, found and usual differ by less than its noise of {noise:.1%}: give more text")
    if summary["use"] == USUAL:
        lines.append(f"NOTICE: the usual network is{' a little' * unsure} better on valid, so use that one")
    if summary["use"] == NO_NETWORK:
        bits = ", ".join(f"{name} {bits:.4f}" for name, bits in valid.items())
        lines.append(f"NOTICE: a network adds nothing to cache and counts but noise (bits per byte on valid: {bits})")
    if text := summary.get("text"):
        lines += ["text by the model to use, after the end of valid:", *(f"  {row}" for row in text)]
    lines.append(f"report, with pictures: {folder / REPORT}; the model to use: {folder / summary['use']}")
    return "\n".join(lines)


def change(bits: float, other: float) -> float:
    """The relative difference to another loss, which may be 0."""
    return bits / max(other, LEAST_LOSS) - 1


def row_of(name: str, one: dict) -> dict[str, str]:
    """The cells of a predictor in the table of the last lines. one: of summary.yaml."""
    alone, what = one.get("network_bits_per_byte", one["bits_per_byte"]), "cache and counts alone"
    if name != NO_NETWORK:
        what = f"width {one['d_model']}, {abbreviate(one['blocks'])}"
    return {
        "on test": name.replace("-", " "),
        "bits per byte": f"{one['bits_per_byte']:.4f}",
        "network alone": "" if alone == one["bits_per_byte"] else f"{alone:.4f}",
        "word perplexity": f"{one['word_perplexity']:,.1f}" if one["word_perplexity_comparable"] else "",
        "ms for 1,000 bytes": f"{one['ms_per_1000_bytes'] + one.get('mixture_ms_per_1000_bytes', 0):.3g}",
        "what it is": f"{one['vocab_size']:,} pieces, {what}",
    }


def aligned(rows: list[dict[str, str]]) -> list[str]:
    """The lines of a table, without columns that are empty. The first and the last column are flush left."""
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    columns = [[head, *(row[head] for row in rows)] for head in heads]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:-1], widths[1:]), cells[-1]])
        for cells in zip(*columns, strict=True)
    ]
