"""Kendall's tau between a SuperNet's ranking of patterns and that of separate trainings, for a comparison.

    python experiments/compare/judge.py RUN_DIR SEARCH [SEARCH ...]

RUN_DIR: run folder of nas.compare. SEARCH: run folders of searches with the same text, sizes and operations. The
reference is the mean loss on test over a pattern's seeds. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.comparison.results import choose_metric, read_results
from nas.comparison.spec import UNMATCHED, contenders_file
from nas.core.errors import run_command
from nas.core.pattern import abbreviate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument("searches", metavar="SEARCH", nargs="+", type=Path)
    arguments = parser.parse_args()
    results = read_results(contenders_file(arguments.run, UNMATCHED))
    metric = choose_metric(results)
    truth = {tuple(result.contender.blocks): float(result.losses(metric).mean()) for result in results}

    from nas.derivation.supernet_evaluator import SuperNetEvaluator
    from scipy.stats import kendalltau

    taus, ordered = {}, sorted(truth, key=truth.get)
    for search in arguments.searches:
        supernet = SuperNetEvaluator(search)
        losses = [
            supernet.path_nll([supernet.supernet.operations.index(name) for name in pattern]) for pattern in ordered
        ]
        print(f"{search}: nll per token on two parts of valid, best pattern on test first")
        names = [abbreviate(list(pattern)) for pattern in ordered]
        print("  ".join(f"{name} {loss:.4f}" for name, loss in zip(names, losses, strict=True)))
        taus[str(search)] = round(float(kendalltau([truth[pattern] for pattern in ordered], losses).statistic), 3)
    print(json.dumps({"tau": taus, "patterns": len(ordered)}))


if __name__ == "__main__":
    run_command(main)
