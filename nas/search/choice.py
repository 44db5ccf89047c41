"""What a search by trials has found: choice.yaml, the lines of pi.jsonl, and the table that is printed.

P networks, N blocks, O operations.
"""

from itertools import chain

import numpy as np

from nas.core.pattern import interleaved
from nas.search.space import Network, make_network
from nas.search.strategy import EQUAL_LOSS, Strategy
from nas.search.trials import Trials, part_of

RECORDED, SHOWN = 60, 6  # networks
NORMAL_95 = 1.96


def choice_record(strategy: Strategy, best: Network) -> dict:
    """The content of choice.yaml."""
    trials, costs = strategy.trials, strategy.costs
    plain = make_network(*best[:2], interleaved(strategy.config.model.blocks))
    return {
        "format": "par-choice/3",
        "name": str(best),
        "network": best.to_dict(),
        "reference": costs.reference.to_dict(),
        "budget": strategy.budget,
        "unit": f"{costs.unit} for 1,000 bytes of text",
        "reference_cost": costs.reference_cost,
        "ratio": costs.ratio(best),
        "interleaved_ratio": costs.ratio(plain),
        "surrogate": {"mean_log_sizes": strategy.mean_log_sizes.tolist(), "text": trials.text._asdict()},
        "trial": {"folder": str(trials.folder / str(best)), **trials.results[best]},
        "trials": [
            {"name": str(one.network), **one.network.to_dict(), "share": one.share, "bits_per_byte": one.loss}
            for one in trials.points
        ],
        "networks": network_records(strategy, best),
        **spent(trials),
    }


def network_records(strategy: Strategy, best: Network) -> list[dict]:
    """Networks with costs and predictions, the best first: those that are most likely the best, those with trials, and
    interleaved ones.

    `behind` is the relative difference of a network's predicted loss at the end of a training to that of the chosen
    one. Where no trial ends a training, the surrogate knows no absolute loss of the end.
    """
    surrogate, costs, tried = strategy.fit(), strategy.costs, strategy.trials.results
    networks = list(dict.fromkeys([*strategy.networks, costs.reference]))  # the reference may be beyond the budget
    losses, errors = surrogate.predict(networks), surrogate.errors(networks, best)
    probabilities = np.zeros(len(networks))
    probabilities[: len(strategy.networks)] = surrogate.probability_best(strategy.networks)
    own = losses[networks.index(best)]
    likely = np.argsort(-probabilities, kind="stable")[:RECORDED]
    shown = {*likely.tolist(), *(i for i, one in enumerate(networks) if one in tried or one.is_interleaved)}
    return [
        {
            "name": str(networks[index]),
            **networks[index].to_dict(),
            "cost": costs.cost(networks[index]),
            "ratio": costs.ratio(networks[index]),
            "behind": float(losses[index] / own - 1),
            "interval": float(NORMAL_95 * errors[index]),
            "probability_best": float(probabilities[index]),
        }
        for index in sorted(shown, key=losses.__getitem__)
    ]


def spent(trials: Trials) -> dict:
    """What the trials have taken. wall_time_s, the last key, tells that the file is complete."""
    results, train = trials.results.values(), trials.config.train
    steps = sum(one["step"] for one in results)
    return {
        "trainings": sum(one["step"] / one["of_steps"] for one in results),
        "train_steps": steps,
        "train_tokens": steps * train.batch_size * train.segment,
        "wall_time_s": sum(one["wall_time_s"] for one in results),
    }


def pi_lines(strategy: Strategy) -> list[dict]:
    """The lines of pi.jsonl, one before the first trial and one for each."""
    config, trials = strategy.config, strategy.trials
    operations = sorted(config.search.operations, key="identity".__eq__)  # identity last
    ratios = np.array([strategy.costs.ratio(network) for network in strategy.networks])
    lines, reached = [], {}
    for count, point in enumerate(chain([None], trials.points)):
        if point:
            reached[point.network] = trials.until(point.network, point.share)
        probabilities = strategy.fit(count).probability_best(strategy.networks)
        pi = block_probabilities(strategy.networks, probabilities, operations, config.model.blocks)
        line = {"step": sum(reached.values()), "temperature": 1.0, "operations": operations, "pi": pi.tolist()}
        lines.append(line | {"expected_latency_ms": None, "expected_cost_ratio": float(probabilities @ ratios)})
    return [line | {"of_steps": lines[-1]["step"]} for line in lines]


def block_probabilities(
    networks: list[Network], probabilities: np.ndarray, operations: list[str], most: int
) -> np.ndarray:
    """pi [N, O]: the probability of each operation in each block of the best network.

    Blocks that it does not have are identity. probabilities [P]: of each network to be the best.
    """
    pi = np.zeros((most, len(operations)))
    for network, probability in zip(networks, probabilities, strict=True):
        blocks = [*network.blocks, *["identity"] * (most - len(network.blocks))]
        pi[range(most), [operations.index(block) for block in blocks]] += probability
    return pi


def networks_table(choice: dict) -> str:
    """The predicted best networks within the budget, a line for each. choice: the content of choice.yaml."""
    head = f"networks within {choice['budget']:.4g} of the reference's {choice['reference_cost']:.4g} {choice['unit']}"
    rows = [f"{head}; predicted loss against the chosen one, and probability of being the best:"]
    for one in [one for one in choice["networks"] if one["ratio"] <= choice["budget"] * (1 + 1e-9)][:SHOWN]:
        cost = f"{one['cost']:.4g}, {one['ratio']:.3f}"
        loss = f"loss {round(one['behind'], 3) + 0:+.1%} ± {one['interval']:.1%}"  # never -0.0%
        rows.append(f"  {one['name']:<28}{cost:<18}{loss:<24}{one['probability_best']:.0%}")
    most = max(one["share"] for one in choice["trials"])
    why = f"the best prediction of those with {part_of(most)}, or the cheapest of equal ones"
    return "\n".join([*rows, f"chosen: {choice['name']}, {why}; {choice['trainings']:.2f} trainings in all"])


def overfit_warning(choice: dict) -> str | None:
    """A warning if the chosen network was better after an earlier trial than with the best weights of its training."""
    losses = {one["share"]: one["bits_per_byte"] for one in choice["trials"] if one["name"] == choice["name"]}
    best = min(losses, key=losses.get)
    if 1.0 not in losses or losses[1.0] <= (1 + EQUAL_LOSS) * losses[best]:
        return None
    return (
        f"WARNING: {choice['name']} had {losses[best]:.4f} bits per byte on valid after {part_of(best)}, and "
        f"{losses[1.0]:.4f} with the best weights of all, so it may overfit; give fewer train.epochs or --minutes, or "
        "more model.dropout"
    )
