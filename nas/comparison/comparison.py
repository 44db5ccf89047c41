"""The run folder of a comparison, its patterns, and the tasks that train them."""

from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from nas.comparison.results import LATENCIES, read_latencies
from nas.comparison.spec import RANDOM, SETTINGS, Contender, Settings, pattern_file
from nas.core.config import Config
from nas.core.config_checks import simplify
from nas.core.errors import InputError
from nas.core.files import write_text, write_yaml
from nas.core.pattern import FORMAT, file_name, interleaved, read_pattern
from nas.core.provenance import provenance
from nas.core.run_folder import OUTCOME, RESULTS, check_folder, has_run, open_run, run_options
from nas.costs.cost_table import CostTable
from nas.costs.latency import ROUNDS, current_costs, measure_models, measurement_conditions
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.retraining.tasks import Task, script_task
from nas.training.build import resolve_auto
from nas.training.device import DeviceContext, device_context, set_up_device

REPORT_ROUNDS = 60  # for the latencies in the report


class Comparison:
    """One RUN_DIR, with search-SEED/, patterns/, runs/PATTERN-SEED/ and logs/. It writes nothing before start().

    Raises InputError if a run in the folder has other settings, or if the recipe does not fit a given pattern.

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
        self.search, self.blocks = search, (search or recipe).model.blocks
        for contender in given:
            simplify(contender.blocks, recipe, f"{contender.name}: block")
        if search and (search.search.vocab_size or search.search.d_model):
            raise InputError("nas.compare needs one vocabulary and width: remove search.vocab_size and search.d_model")
        if search and search.search.method == "trials" and len(settings.search_seeds) > 1:
            raise InputError("search.method=trials chooses one network: give one of search_seeds")
        if search and search.model.d_model != recipe.model.d_model:
            raise InputError(
                f"the search has model.d_model={search.model.d_model}, and the trainings {recipe.model.d_model}; "
                "they must be equal"
            )
        search_seeds = settings.search_seeds if search else None
        self.search_folders = {seed: path / f"search-{seed}" for seed in search_seeds or []}
        check_folder(path, has_run(path))
        self.run = open_run(path, recipe, "compare", extra={"search_seeds": search_seeds})
        self.recipe = self.run.resolve_auto(recipe)
        self.search_tasks()  # this call and the next check every run
        self.training_tasks(self.known_contenders())

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus(prepare(self.recipe.data))

    def start(self, text: str) -> None:
        """Prepare the data, lock the folder, and write the given patterns. text: the content of COMPARISON.yaml."""
        context = set_up_device(self.recipe.seed, self.recipe.train)
        self.recipe = resolve_auto(self.recipe, self.corpus)
        self.run.start(self.recipe, provenance(self.recipe, self.corpus.meta, context))
        for contender in self.given:
            self.write_pattern(contender)
        write_text(self.path / SETTINGS, text)

    def search_tasks(self) -> list[Task]:
        tasks = []
        for seed, folder in self.search_folders.items():
            open_run(folder, replace(self.search, seed=seed), "search")
            arguments = [self.settings.search, *run_options(folder), *self.overrides, f"seed={seed}"]
            tasks.append(self.task(folder.name, "search.py", arguments, folder / OUTCOME))
        return tasks

    def derivation_tasks(self) -> list[Task]:
        """A task for each searched pattern."""
        tasks = []
        for name, budget in self.settings.searched.items():
            how = [] if budget is None else ["--latency-budget", budget]
            out = pattern_file(self.path, name)
            arguments = [*self.search_folders.values(), *how, "--out", out]
            tasks.append(self.task(f"derive-{name}", "derive.py", arguments, out))
        return tasks

    def training_tasks(self, contenders: list[Contender]) -> list[Task]:
        """A task for each distinct pattern and each of its seeds, ordered by seed."""
        tasks, settings = {}, self.settings
        for seed, contender in product([*settings.seeds, *settings.seeds_of(RANDOM)], contenders):
            folder = self.path / "runs" / f"{contender.key}-{seed}"
            if folder in tasks or seed not in settings.seeds_of(contender.kind):
                continue
            extra = {"pattern": simplify(contender.blocks, self.recipe, f"{contender.name}: block")}  # as in retrain.py
            open_run(folder, replace(self.recipe, seed=seed), "retrain", extra=extra)
            arguments = [pattern_file(self.path, contender.name), settings.retrain, *run_options(folder)]
            arguments += [*self.overrides, f"seed={seed}"]
            tasks[folder] = self.task(folder.name, "retrain.py", arguments, folder / RESULTS)
        return list(tasks.values())

    def task(self, name: str, script: str, arguments: list, result: Path) -> Task:
        return script_task(name, script, arguments, result, self.path / "logs" / f"{name}.txt")

    def write_pattern(self, contender: Contender, **origin) -> None:
        """Write a pattern file that does not exist yet. Raises InputError if its name belongs to another pattern."""
        file = pattern_file(self.path, contender.name)
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            origin = {"method": contender.kind, **origin}
            write_yaml(file, {"format": FORMAT, "blocks": contender.blocks, "derived_from": origin})
        elif read_pattern(file)["blocks"] != contender.blocks:
            raise InputError(f"{file} holds another pattern than {contender.key}; give another --run folder")

    @cached_property
    def timing(self) -> tuple[Config, np.ndarray, DeviceContext]:
        """What latencies are measured with: the recipe with the blocks and operations of the search, how often the
        training text has each token [V], and the device.
        """
        options = replace(self.recipe.search, operations=(self.search or self.recipe).search.operations)
        config = replace(self.recipe, search=options, model=replace(self.recipe.model, blocks=self.blocks))
        return config, self.corpus.counts(), device_context(config.train)

    def cost_table(self, path: Path) -> CostTable:
        """Milliseconds of each operation: read from the file if valid for this device, else measured and written."""
        table = current_costs(*self.timing, path)
        table.write(path)
        return table

    def measure(self, patterns: list[list[str]], rounds: int = ROUNDS) -> dict[str, dict]:
        """{short form without spaces: latency}, all measured in the same rounds."""
        distinct = {file_name(blocks): blocks for blocks in [interleaved(self.blocks), *patterns]}
        latencies = measure_models(list(distinct.values()), *self.timing, rounds)
        return dict(zip(distinct, latencies, strict=True))

    def measure_latencies(self) -> None:
        """Write the latencies of all pattern files, unless all have been measured under the present conditions."""
        patterns = [read_pattern(file)["blocks"] for file in self.path.glob("patterns/*.yaml")]
        config, counts, context = self.timing
        now = measurement_conditions(config, len(counts), sorted(set().union(*patterns)), context)
        names, before = set(map(file_name, patterns)), read_latencies(self.path)
        if before["holds_for"] != now or not names <= before["patterns"].keys():
            print(f"measuring the latency of {len(names)} patterns", flush=True)
            write_yaml(self.path / LATENCIES, {"patterns": self.measure(patterns, REPORT_ROUNDS), "holds_for": now})

    def known_contenders(self) -> list[Contender]:
        """The given contenders, and the derived ones that have a pattern file."""
        files = {pattern_file(self.path, name): kind for name, kind in self.settings.derived_names.items()}
        derived = [Contender(f.stem, kind, read_pattern(f)["blocks"]) for f, kind in files.items() if f.exists()]
        return [*self.given, *derived]
