"""Optuna over the same space, with the same steps: `python experiments/outside/optuna_search.py --out runs/frontier`
(pip install -r experiments/outside/requirements.txt).

TPE proposes and successive halving prunes (ASHA), on the same trials as those of the search: parts of trainings, judged
by the loss of the network on valid after an eighth, a quarter and a half. Together they have the steps of the search's
rungs. The first proposals are the deepest interleaved networks within the budget, one for each vocabulary. A network
beyond the budget takes no steps; TPE knows by how much it is beyond. The network of the best trial is trained to the
end like that of the search, with the same mixture.
"""

import shutil
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.frontier.problem import open_text, options_of_cell, read_arguments, read_run, results_of, seeds_of
from experiments.frontier.run import fits
from experiments.helpers import FRONTIER, open_space, open_trials
from nas.core.errors import run_command

EIGHTHS = 1, 2, 4  # of a training, after which trials may be pruned
STARTUP = 4  # trials before TPE has a model
SUGGESTIONS = 5000  # at most, of which most are beyond small budgets
CHANCES = 10  # suggestions of a network in a row, before one that was tried already ends the search


def suggest(trial, config, shapes: list):
    """A network of the search's space."""
    from nas.search.space import make_network

    names = [name for name in config.search.operations if name != "identity"]
    sizes, widths = (sorted({shape[part] for shape in shapes}) for part in (0, 1))
    size, width = trial.suggest_categorical("pieces", sizes), trial.suggest_categorical("width", widths)
    blocks = trial.suggest_int("blocks", 0, config.model.blocks)
    return make_network(size, width, [trial.suggest_categorical(f"block {i}", names) for i in range(blocks)])


def starts(config, costs, shapes: list, limit: float) -> list[dict]:
    """What suggest() takes for the deepest interleaved networks of the reference's width within the budget."""
    from nas.core.pattern import interleaved
    from nas.costs.baselines import deepest
    from nas.search.space import within_budget

    found = []
    for size, width in (shape for shape in shapes if shape[1] == costs.reference.d_model):
        affordable = within_budget(costs.tables[size, width], limit)
        if blocks := deepest(interleaved, config.model.blocks, affordable):
            named = {f"block {index}": name for index, name in enumerate(blocks)}
            found.append({"pieces": size, "width": width, "blocks": len(blocks), **named})
    return found


def search(cell: Path, options: list[str]) -> dict:
    """The results of the network that Optuna finds, trained to the end."""
    import optuna

    from nas.jobs.tasks import run_tasks
    from nas.search.network_search import COSTS
    from nas.search.space import within_budget
    from nas.search.trials import RUNGS, batches

    if not fits(cell.parent, options):
        return {"network": None}
    folder = cell / "optuna"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(cell.parent / COSTS, cell)
    config, corpora, shapes, costs, runtime = open_space(FRONTIER, cell, options)
    trials = open_trials(config, corpora, folder, runtime)
    limit = config.search.latency.target * costs.reference_cost
    left = sum(8 * share * count for share, count in batches(RUNGS))  # eighths of a training
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=EIGHTHS[0], reduction_factor=2)
    sampler = optuna.samplers.TPESampler(
        seed=zlib.crc32(f"{cell.parent.name} {cell.name}".encode()),
        n_startup_trials=STARTUP,
        multivariate=True,
        group=True,
        constraints_func=lambda trial: [trial.user_attrs["beyond"]],
    )
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    for network in starts(config, costs, shapes, limit):
        study.enqueue_trial(network)
    reached, tried = {}, 0
    for _ in range(SUGGESTIONS):
        trial = study.ask()
        network = suggest(trial, config, shapes)
        trial.set_user_attr("beyond", costs.cost(network) / limit - 1)
        if not within_budget(costs.tables[network[:2]], limit)(network.blocks):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        tried += 1
        before, state, loss = 0, optuna.trial.TrialState.COMPLETE, None
        for eighths in EIGHTHS:
            if network not in reached or eighths not in reached[network]:
                if left < eighths - before:
                    state = optuna.trial.TrialState.FAIL
                    break
                trials.run([network], eighths / 8)
                reached.setdefault(network, {})[eighths] = trials.points[-1].loss
                left -= eighths - before
            before, loss = eighths, reached[network][eighths]
            trial.report(loss, eighths)
            if eighths < EIGHTHS[-1] and trial.should_prune():
                state = optuna.trial.TrialState.PRUNED
                break
        study.tell(trial, loss if state == optuna.trial.TrialState.COMPLETE else None, state=state)
        if left < 1 or tried > CHANCES * max(1, len(reached)):
            break
    furthest = max(max(own) for own in reached.values())  # without a complete trial, the best of the longest
    best = min((own[furthest], network) for network, own in reached.items() if furthest in own)[1]
    task = trials.task(best, None, trials.folder)
    if failed := run_tasks([task], trials.engine):
        raise RuntimeError(f"the training failed: {failed}")
    seconds = sum(result["wall_time_s"] for result in trials.results.values())
    about = {"network": best.to_dict(), "ratio": costs.ratio(best), "seconds": seconds, "tried": len(reached)}
    result = about | read_run(task.result.parent)
    for checkpoint in folder.rglob("checkpoint.pt"):
        checkpoint.unlink()
    return result


def main() -> None:
    arguments = read_arguments(__doc__)
    jobs = results_of(arguments)
    for text in arguments.texts:
        open_text(arguments, text)
        for budget in arguments.budgets:
            for seed in seeds_of(text):
                options = options_of_cell(text, budget, seed, arguments.overrides)
                cell = arguments.out / text / f"{budget}-{seed}-optuna"
                jobs.do(f"{text},{budget},optuna,{seed}", lambda: search(cell, options))  # noqa: B023


if __name__ == "__main__":
    run_command(main)
