"""Optuna over the same space, with the same steps: `python experiments/outside/optuna_search.py --out runs/frontier`
(pip install -r experiments/outside/requirements.txt).

TPE proposes and successive halving prunes (ASHA), on the same trials as those of the search: parts of trainings, judged
on valid with the mixture after an eighth, a quarter and a half. With --alone, they are judged by networks alone.
Together they have the steps of the search's rungs. The first proposals are the deepest interleaved networks within the
budget, one for each vocabulary. A network beyond the budget takes no steps; TPE knows by how much it is beyond. The
network of the best trial is trained to the end like that of the search, with the same mixture.
"""

import sys
import zlib
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.frontier.problem import cells_of, deepest_interleaved, read_arguments, read_run, results_of
from experiments.frontier.run import fits
from experiments.helpers import FRONTIER, open_space, open_trials
from nas.core.errors import RunError, run_command
from nas.search.space import Network, make_network, within_budget

PREDICTORS = "optuna", "optuna-alone"
EIGHTHS = 1, 2, 4  # of a training, after which trials may be pruned
STARTUP = 4  # trials before TPE has a model
SUGGESTIONS = 5000  # at most, of which most are beyond small budgets
CHANCES = 10  # suggestions within the budget for each network that was tried; more end the search


def suggest(trial, config, shapes: list) -> Network:
    """A network of the search's space."""
    names = [name for name in config.search.operations if name != "identity"]
    sizes, widths = (sorted({shape[part] for shape in shapes}) for part in (0, 1))
    size, width = trial.suggest_categorical("pieces", sizes), trial.suggest_categorical("width", widths)
    blocks = trial.suggest_int("blocks", 0, config.model.blocks)
    return make_network(size, width, [trial.suggest_categorical(f"block {i}", names) for i in range(blocks)])


def open_study(config, costs, shapes: list, name: str):
    """A study that begins with the deepest interleaved networks of the reference's width within the budget."""
    import optuna

    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=EIGHTHS[0], reduction_factor=2)
    sampler = optuna.samplers.TPESampler(
        seed=zlib.crc32(name.encode()),
        n_startup_trials=STARTUP,
        multivariate=True,
        group=True,
        constraints_func=lambda trial: [trial.user_attrs["beyond"]],
    )
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    for size, width in (shape for shape in shapes if shape[1] == costs.reference.d_model):
        if blocks := deepest_interleaved(config, costs, (size, width)):
            named = {f"block {index}": block for index, block in enumerate(blocks)}
            study.enqueue_trial({"pieces": size, "width": width, "blocks": len(blocks), **named})
    return study


def run_study(study, trials, config, costs, shapes: list, alone: bool) -> dict[Network, dict[int, float]]:
    """The loss of each network that took steps after each of EIGHTHS that it reached. alone: without the mixture."""
    from optuna.trial import TrialState

    from nas.search.trials import RUNGS, batches

    limit = config.search.latency.target * costs.reference_cost
    left = sum(8 * share * count for share, count in batches(RUNGS))  # eighths of a training
    reached, tried = {}, 0
    for _ in range(SUGGESTIONS):
        trial = study.ask()
        network = suggest(trial, config, shapes)
        trial.set_user_attr("beyond", costs.cost(network) / limit - 1)
        if not within_budget(costs.tables[network[:2]], limit)(network.blocks):
            study.tell(trial, state=TrialState.PRUNED)
            continue
        tried += 1
        own, before, state = reached.setdefault(network, {}), 0, TrialState.COMPLETE
        for eighths in EIGHTHS:
            if eighths not in own:
                if left < eighths - before:
                    state = TrialState.FAIL
                    break
                trials.run([network], eighths / 8)
                judged = trials.results[network]["network"] if alone else trials.results[network]
                own[eighths], left = judged["valid"]["bits_per_byte"], left - (eighths - before)
            before = eighths
            trial.report(own[eighths], eighths)
            if eighths < EIGHTHS[-1] and trial.should_prune():
                state = TrialState.PRUNED
                break
        study.tell(trial, own[before] if state == TrialState.COMPLETE else None, state=state)
        if left < 1 or tried > CHANCES * max(1, sum(map(bool, reached.values()))):
            break
    return {network: own for network, own in reached.items() if own}


def search(cell: Path, options: list[str], predictor: str) -> dict:
    """The results of the network that Optuna finds, trained to the end. predictor: of PREDICTORS."""
    from nas.jobs.tasks import run_tasks

    config, corpora, shapes, costs, runtime = open_space(FRONTIER, cell.parent, options)
    if not fits(config, shapes, costs):
        return {"network": None}
    folder = cell.with_name(f"{cell.name}-{predictor}")
    trials = open_trials(config, corpora, folder, runtime)
    study = open_study(config, costs, shapes, f"{folder.parent.name} {folder.name}")
    reached = run_study(study, trials, config, costs, shapes, predictor == PREDICTORS[True])
    furthest = max(max(own) for own in reached.values())  # without a complete trial, the best of the longest
    best = min((own[furthest], network) for network, own in reached.items() if furthest in own)[1]
    task = trials.task(best, None, trials.folder)
    if failed := run_tasks([task], trials.engine):
        raise RunError(f"the training failed: {failed}")
    seconds = sum(result["wall_time_s"] for result in trials.results.values())
    about = {"network": best.to_dict(), "ratio": costs.ratio(best), "seconds": seconds, "tried": len(reached)}
    result = about | read_run(task.result.parent)
    for checkpoint in folder.rglob("checkpoint.pt"):
        checkpoint.unlink()
    return result


def main() -> None:
    arguments = read_arguments(__doc__, "--alone")
    jobs = results_of(arguments)
    for name, seed, cell, options in cells_of(arguments):
        predictor = PREDICTORS[arguments.alone]
        jobs.do(f"{name},{predictor},{seed}", partial(search, cell, options, predictor))


if __name__ == "__main__":
    run_command(main)
