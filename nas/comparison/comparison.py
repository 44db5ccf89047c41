"""The run folder of a comparison, its patterns, and the tasks that train them."""

import sys
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path

from nas.comparison.spec import (
    RANDOM,
    Contender,
    Settings,
    pattern_file,
    search_folder,
    settings_file,
    training_folder,
)
from nas.comparison.tasks import Task
from nas.comparison.timer import Timer, with_d_ffn
from nas.core.config import Config
from nas.core.config_checks import check_pattern
from nas.core.errors import InputError
from nas.core.files import write_text, write_yaml
from nas.core.pattern import FORMAT, abbreviate, read_pattern
from nas.core.provenance import provenance
from nas.core.run_folder import OUTCOME, RESULTS, open_run
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.search.maturity import MATURE, MATURE_WITH_TRIALS, maturity_warning
from nas.training.build import count_parameters, resolve_cutoffs
from nas.training.device import device_context, set_up_device

ROOT = Path(__file__).resolve().parents[2]  # the folder of the scripts


class Comparison:
    """One RUN_DIR, with search-SEED/, patterns/, runs/PATTERN-SEED/ and logs/.

    Raises InputError if a run in the folder has other settings, or if the recipe does not fit a given pattern. The
    class writes nothing before start().

    Args:
        given: the contenders that need no search.
        recipe: the configuration of every training.
        search: the configuration of the searches, or None.
        overrides: `section.key=value` options of searches and trainings.
    """

    def __init__(
        self,
        settings: Settings,
        given: list[Contender],
        recipe: Config,
        search: Config | None,
        path: Path,
        overrides: list[str],
    ):
        self.settings, self.given, self.path, self.overrides = settings, given, path, overrides
        self.recipe, self.search, self.blocks = recipe, search, (search or recipe).model.blocks
        for contender in given:
            check_pattern(contender.blocks, recipe)
        search_seeds = settings.search_seeds if search else None
        self.search_folders = {seed: search_folder(path, seed) for seed in search_seeds or []}
        self.run = open_run(path, recipe, "compare", resume=True, extra={"search_seeds": search_seeds})
        self.recipe = self.run.resolve_auto(recipe)
        self.search_tasks()  # this call and the next check every run
        self.training_tasks(self.known_contenders())

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus(prepare(self.recipe.data))

    @cached_property
    def timer(self) -> Timer:
        given = sorted({name for contender in self.given for name in contender.blocks})
        operations = self.search.search.operations if self.search else given
        return Timer(self.recipe, operations, self.blocks, self.corpus.counts(), device_context(self.recipe.train))

    def start(self, text: str) -> None:
        """Prepare the data, lock the folder, and write the given patterns. text: the content of COMPARISON.yaml."""
        context = set_up_device(self.recipe.seed, self.recipe.train)
        self.warn_of_immature_weights()
        self.recipe = resolve_cutoffs(self.recipe, self.corpus)
        self.run.start(self.recipe, provenance(self.recipe, self.corpus.meta, context))
        for contender in self.given:
            self.write_pattern(contender)
        write_text(settings_file(self.path), text)

    def warn_of_immature_weights(self) -> None:
        """Print a warning if a search trains its operations clearly less than the recipe trains patterns."""
        search, steps = self.search, self.recipe.train.steps  # None if epochs are given
        if search and search.search.method == "single_path" and not search.search.weights_from and search.train.steps:
            share = MATURE_WITH_TRIALS if self.settings.trials else MATURE
            print(maturity_warning(search, search.train.steps, steps, share) or "", end="")

    def search_tasks(self) -> list[Task]:
        tasks = []
        for seed, folder in self.search_folders.items():
            open_run(folder, replace(self.search, seed=seed), "search", resume=True)
            arguments = [self.settings.search, "--run", folder, "--resume", *self.overrides, f"seed={seed}"]
            tasks.append(self.task(folder.name, "search.py", arguments, folder / OUTCOME))
        return tasks

    def derivation_tasks(self) -> list[Task]:
        """A task for each searched pattern."""
        tasks = []
        for name, budget in self.settings.searched.items():
            how = [] if budget is None else ["--latency-budget", budget]
            how += ["--trials", self.settings.trials] if self.settings.trials else []
            out = pattern_file(self.path, name)
            arguments = [*self.search_folders.values(), *how, "--out", out]
            tasks.append(self.task(f"derive-{name}", "derive.py", arguments, out))
        return tasks

    def training_tasks(self, contenders: list[Contender]) -> list[Task]:
        """A task for each distinct pattern and each of its seeds, ordered by seed."""
        tasks, settings = {}, self.settings
        for seed, contender in product(dict.fromkeys([*settings.seeds, *settings.seeds_of(RANDOM)]), contenders):
            folder = training_folder(self.path, contender, seed)
            if folder in tasks or seed not in settings.seeds_of(contender.kind):
                continue
            config = replace(with_d_ffn(self.recipe, contender.d_ffn), seed=seed)
            open_run(folder, config, "retrain", resume=True, extra={"pattern": contender.blocks})
            d_ffn = [] if contender.d_ffn is None else [f"model.d_ffn={contender.d_ffn}"]
            arguments = [pattern_file(self.path, contender.name), self.settings.retrain, "--run", folder, "--resume"]
            arguments += [*self.overrides, f"seed={seed}", *d_ffn]
            tasks[folder] = self.task(folder.name, "retrain.py", arguments, folder / RESULTS)
        return list(tasks.values())

    def task(self, name: str, script: str, arguments: list, result: Path) -> Task:
        file = ROOT / script
        if file.is_relative_to(Path.cwd()):  # so that the command in provenance.yaml also works in other checkouts
            file = file.relative_to(Path.cwd())
        command = [sys.executable, str(file), *map(str, arguments)]
        return Task(name, command, result, self.path / "logs" / f"{name}.txt")

    def write_pattern(self, contender: Contender, **origin) -> None:
        """Write a pattern file that does not exist yet. Raises InputError if its name belongs to another pattern."""
        file = pattern_file(self.path, contender.name)
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            content = {"format": FORMAT, "blocks": contender.blocks}
            write_yaml(file, {**content, "derived_from": {"method": contender.kind, **origin}})
        elif read_pattern(file)["blocks"] != contender.blocks:
            raise InputError(
                f"{file} holds another pattern than {abbreviate(contender.blocks)}; give another --run folder"
            )

    def known_contenders(self) -> list[Contender]:
        """The given contenders, and the derived ones that have a pattern file."""
        names = self.settings.derived_names.items()
        files = [(name, kind, pattern_file(self.path, name)) for name, kind in names]
        derived = [Contender(name, kind, read_pattern(file)["blocks"]) for name, kind, file in files if file.exists()]
        return [*self.given, *derived]

    def parameters(self, blocks: list[str], d_ffn: int | None = None) -> int:
        """The number of parameters of a pattern."""
        return count_parameters(blocks, with_d_ffn(self.recipe, d_ffn), self.corpus.vocab_size)
