"""Trials: short trainings of a few patterns from scratch.

Weights that all patterns share misjudge patterns unlike the average path, such as those of few attention and many dense
blocks, and hide how hard a pattern is to train. They rank patterns of similar blocks better. Therefore the candidates
are the best patterns for several numbers of attention blocks. The pattern of pi and the best rule by shared weights
have a trial however far behind they are.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from nas.core.config_loading import load_config
from nas.core.pattern import ATTENDING, expand, limited_operations, network
from nas.costs.budget import NoPatternFits
from nas.costs.cost_table import CostTable
from nas.derivation.pattern_record import Choice
from nas.derivation.relearning import relearn
from nas.derivation.runs import SearchRun
from nas.derivation.supernet_evaluator import SuperNetEvaluator, choose_among_seeds, describe_path
from nas.retraining.phase import train_pattern
from nas.search.schedule import retraining_steps
from nas.training.build import count_steps

PROMISING = 0.06  # nats per token behind the best by shared weights (experiments/ranking)
LONG_ENOUGH = 0.5  # of the retraining's steps; shorter trials may prefer patterns that learn fast


class Trials:
    """Trains patterns from scratch with the options of the first search, each network once."""

    def __init__(self, runs: list[SearchRun], costs: CostTable, evaluators: list[SuperNetEvaluator], steps: int | None):
        """steps: None for half of the retraining's steps. Prints a warning if fewer are given."""
        self.runs, self.costs, self.evaluators = runs, costs, evaluators
        self.operations, self.losses = runs[0].operations, {}
        config, text = evaluators[0].config, len(evaluators[0].corpus.tokens("train"))
        trained = load_config(runs[0].weights_run / "config.yaml", []) if config.search.weights_from else config
        final = config.search.retrain_steps or retraining_steps(trained, count_steps(trained, text))
        enough = math.ceil(LONG_ENOUGH * final)
        self.steps = steps or enough
        print(f"trials of {self.steps:,} steps, for patterns that train for {final:,} steps (search.retrain_steps)")
        if self.steps < enough:
            print(f"WARNING: these trials are too short to order such patterns: give at least {enough} steps")

    def choose(self, choice: Choice, budget: float) -> Choice:
        """The best after trials of a choice, its candidates, and patterns with fewer attentions.

        Patterns with fewer attentions are added to its candidates, down to the first that is more than PROMISING behind
        the pattern of pi by shared weights. `trial_nll` is added to each candidate that has a trial.

        Args:
            budget: the highest cost, as a ratio to the interleaved pattern's.
        """
        began, choices = time.monotonic(), {}
        compared = {name: dict(about) for name, about in choice.candidates.items()}
        for name, fewer in self.with_fewer_attentions(choice, budget):
            choices[name], compared[name] = fewer, describe_path(self.evaluators, self.operations, fewer.path)
            if compared[name]["nll"] > compared["pi"]["nll"] + PROMISING:
                break
        limit = min(about["nll"] for about in compared.values()) + PROMISING
        rules = {name: about["nll"] for name, about in choice.candidates.items() if name != "pi"}
        always = {"pi", *(name for name, nll in rules.items() if nll == min(rules.values()))}
        promising = {name: about for name, about in compared.items() if name in always or about["nll"] <= limit}
        networks = {}
        for about in promising.values():
            networks.setdefault(network(expand(about["pattern"])), about["pattern"])
        for number, short in enumerate(networks.values(), start=1):
            print(f"trial {number} of {len(networks)}: {short}", end="  ", flush=True)
            print(f"{self.nll(expand(short)):.4f}", flush=True)
        for about in promising.values():
            about["trial_nll"] = round(self.nll(expand(about["pattern"])), 4)
        name = min(promising, key=lambda name: promising[name]["trial_nll"])
        path = [self.operations.index(part) for part in expand(promising[name]["pattern"])]
        seconds = (choice.seconds or 0) + time.monotonic() - began
        chosen = choices.get(name, choice)  # a pattern with fewer attentions has its own pi
        given = chosen.budget if choice.budget is None else choice.budget
        chosen = replace(chosen, path=path, budget=given, seconds=seconds)
        return replace(chosen, candidates=compared, trials=self.steps, chosen=name)

    def with_fewer_attentions(self, choice: Choice, budget: float) -> Iterator[tuple[str, Choice]]:
        """The best patterns within a budget with at most two thirds of the attention blocks, then with two thirds of
        that number, and so on. The last has none if a cheaper attention is among the operations, else one or more.

        Which operations count as attention: limited_operations(). pi is learned anew for each.
        """
        limited = limited_operations(self.operations)
        least = 0 if any(name in ATTENDING and name not in limited for name in self.operations) else 1
        while count := sum(self.operations[index] in limited for index in choice.path):
            most = 2 * count // 3
            if most < least:
                return
            try:
                (choice,) = relearn(self.runs, self.costs, [budget], most)
            except NoPatternFits:  # without identity, dense blocks in place of attention may cost more than the budget
                return
            choice = choose_among_seeds(choice, self.runs, self.costs, self.evaluators)
            yield f"attention <= {most}", choice

    def nll(self, pattern: list[str]) -> float:
        """nll per token on valid of a pattern trained from scratch, at its best evaluation.

        It is evaluated every train.evaluate_every steps, or at the last step only if that is 0.
        """
        if network(pattern) not in self.losses:
            evaluator, losses = self.evaluators[0], []
            config = replace(evaluator.config, train=replace(evaluator.config.train, steps=self.steps, epochs=None))
            every = config.train.evaluate_every or self.steps

            def evaluate(step, phase):
                if step % every == 0 or step == self.steps:
                    losses.append(phase.valid_figures()["nll_per_token"])

            train_pattern(pattern, config, evaluator.corpus, evaluator.context, evaluate)
            self.losses[network(pattern)] = min(losses)
        return self.losses[network(pattern)]
