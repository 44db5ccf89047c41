"""Baselines that depend on the searched patterns' latencies: most parameters within the smallest, and random ones."""

from dataclasses import replace
from itertools import islice

from nas.comparison.comparison import Comparison
from nas.comparison.spec import (
    PARAMETERS,
    RANDOM,
    SAME_LATENCY,
    SEARCHED,
    Contender,
    is_random_of,
    pattern_file,
    random_names,
)
from nas.core.pattern import abbreviate, interleaved, network
from nas.core.run_folder import LATENCY
from nas.costs.cost_table import CostTable
from nas.derivation.baselines import most_parameters, random_patterns

BATCH, TRIES = 2, 10  # patterns timed in a round for each missing one; the highest number of rounds


def choose_baselines(comparison: Comparison) -> None:
    """Write the missing pattern files of these baselines. Nothing else should run meanwhile, because latencies are
    measured.
    """
    settings = comparison.settings
    searched = [contender for contender in comparison.known_contenders() if contender.kind == SEARCHED]
    complete = len(searched) == len(settings.searched)  # a derivation may have failed
    wanted = [PARAMETERS] if complete and PARAMETERS in settings.patterns else []
    wanted += [name for contender in searched for name in random_names(contender.name, settings.random)]
    missing = [name for name in wanted if not pattern_file(comparison.path, name).exists()]
    if not missing:
        return
    table = comparison.timer.table(comparison.path / LATENCY)
    if PARAMETERS in missing:
        choose_most_parameters(comparison, table, min(table.cost(contender.blocks) for contender in searched))
    for contender in searched:
        names = [name for name in missing if is_random_of(name, contender.name)]
        if names:
            draw_random(comparison, names, table, contender)


def choose_most_parameters(comparison: Comparison, table: CostTable, budget: float) -> None:
    operations = comparison.search.search.operations
    sizes = {name: comparison.parameters([name]) - comparison.parameters([]) for name in operations}
    blocks = most_parameters(comparison.blocks, operations, sizes, table, budget)
    ratio = round(table.cost(blocks) / budget, 4)
    comparison.write_pattern(Contender(PARAMETERS, PARAMETERS, blocks), predicted_ratio_to_searched=ratio)


def draw_random(comparison: Comparison, names: list[str], table: CostTable, searched: Contender) -> None:
    """Draw patterns with the searched pattern's predicted latency; keep those that also have its measured latency.

    Both latencies may differ by a share SAME_LATENCY.
    """
    own = [other for other in comparison.known_contenders() if is_random_of(other.name, searched.name)]
    seen = {network(other.blocks) for other in (searched, *own)}
    target, operations = table.cost(searched.blocks), comparison.search.search.operations
    draws = random_patterns(comparison.blocks, operations, table, target, SAME_LATENCY, seed=0)
    fresh = (Contender("", RANDOM, blocks) for blocks in draws if network(blocks) not in seen)
    missing = list(names)
    for _ in range(TRIES):
        batch = list(islice(fresh, BATCH * len(missing)))
        if not batch:
            break
        times = comparison.timer.measure([searched, *batch])
        for contender in batch:
            ratio = times[contender.key]["median_ms"] / times[searched.key]["median_ms"]
            if missing and abs(ratio - 1) <= SAME_LATENCY:
                predicted = table.cost(contender.blocks) / target
                comparison.write_pattern(
                    replace(contender, name=missing[0]),
                    at_latency_of=abbreviate(searched.blocks),
                    predicted_ratio=round(predicted, 4),
                    measured_ratio=round(ratio, 4),
                )
                print(f"drew {missing.pop(0)}: {contender.key}, {ratio:.3f} of the latency of {searched.name}")
    if missing:
        print(
            f"NOTICE: no pattern was found for {', '.join(missing)}, because few have the latency of {searched.name}; "
            "repeat the command to try again"
        )


def match_parameters(comparison: Comparison, contender: Contender) -> Contender | None:
    """The contender at the d_ffn with which its number of parameters is closest to the interleaved pattern's.

    None if the pattern has no dense block, or if it has more parameters even at d_ffn = 1.
    """
    target = comparison.parameters(interleaved(comparison.blocks))
    one, two = (comparison.parameters(contender.blocks, d_ffn) for d_ffn in (1, 2))
    if one == two or one > target:
        return None
    d_ffn = 1 + round((target - one) / (two - one))
    return replace(contender, d_ffn=None if d_ffn == comparison.recipe.model.d_ffn else d_ffn)
