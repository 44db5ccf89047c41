"""Baselines that depend on the searched pattern's latency: most parameters within it, and random patterns of it."""

from dataclasses import replace
from itertools import islice

from nas.comparison.comparison import Comparison
from nas.comparison.spec import PARAMETERS, RANDOM, SAME_LATENCY, SEARCHED, Contender, pattern_file
from nas.core.pattern import abbreviate, interleaved, network
from nas.costs.cost_table import CostTable
from nas.derivation.baselines import most_parameters, random_patterns

BATCH, TRIES = 2, 10  # patterns timed in a round for each missing one; the highest number of rounds


def choose_baselines(comparison: Comparison) -> None:
    """Write the missing pattern files of these baselines. Nothing else should run meanwhile, because latencies are
    measured.
    """
    names = [name for name, kind in comparison.settings.derived_names.items() if kind in (PARAMETERS, RANDOM)]
    missing = [name for name in names if not pattern_file(comparison.path, name).exists()]
    if missing:
        searched = next(contender for contender in comparison.known_contenders() if contender.name == SEARCHED)
        table = comparison.timer.table(comparison.path / "latency.yaml")
        if PARAMETERS in missing:
            choose_most_parameters(comparison, table, table.cost(searched.blocks))
        draw_random(comparison, [name for name in missing if name != PARAMETERS], table, searched)


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
    known = comparison.known_contenders()
    seen = {network(other.blocks) for other in known if other.kind in (SEARCHED, RANDOM)}
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
                print(f"drew {missing.pop(0)}: {contender.key}, {ratio:.3f} of the searched pattern's latency")
    if missing:
        print(
            f"NOTICE: no pattern was found for {', '.join(missing)}, because few have the searched pattern's latency; "
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
