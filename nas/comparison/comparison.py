"""The run folder of a comparison, and the tasks that train its contenders."""

from dataclasses import replace
from pathlib import Path

from nas.comparison.results import LATENCIES, read_latencies
from nas.comparison.spec import FORMAT, SETTINGS, Contender, Settings
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import read_pattern, shape_options
from nas.core.run_folder import RESULTS, RunFolder, check_folder, has_run, provenance
from nas.costs.flops import batch_shape
from nas.costs.measurement import device_conditions, text_times
from nas.data.corpus import Corpus, prepare
from nas.jobs.engines import open_engine
from nas.jobs.tasks import Engine, Task, training_task, unfinished
from nas.training.device import choose_runtime, set_up_device
from nas.training.passes import auto_lines, resolve_auto

ROUNDS = 60  # of the latencies


class Comparison:
    """One RUN_DIR, with patterns/, runs/NETWORK-SEED/ and logs/. It writes nothing before start().

    contenders: the first one is the control. recipe: the configuration of the trainings, without a contender's sizes.
    overrides: `section.key=value` options of the trainings. Raises InputError if a run has other settings.
    """

    def __init__(
        self, settings: Settings, contenders: list[Contender], recipe: Config, path: Path, overrides: list[str]
    ):
        self.settings, self.contenders, self.path, self.overrides = settings, contenders, path, overrides
        check_folder(path, has_run(path), "compare")
        self.run = RunFolder(path, recipe, "compare")
        self.recipe = self.run.resolve_auto(recipe)
        for file, own in ((self.pattern_file(contender), contender) for contender in contenders):
            recorded = read_pattern(file) if file.exists() else own.content
            if recorded["blocks"] != own.blocks or shape_options(recorded) != shape_options(own.content):
                raise InputError(f"{file} differs from {own.key} now; rename the pattern, or give another folder")
        self.tasks()  # checks every run

    def pattern_file(self, contender: Contender) -> Path:
        return self.path / "patterns" / f"{contender.name}.yaml"

    def start(self) -> Engine | None:
        """Prepare the data, lock the folder, write the settings and the pattern files. Returns what runs the tasks;
        None if all have finished.
        """
        runtime = set_up_device(self.recipe.seed, self.recipe.train)
        engine = open_engine(self.recipe, runtime, self.path) if unfinished(self.tasks()) else None
        corpus = Corpus(prepare(self.recipe.data))
        given, self.recipe = self.recipe, resolve_auto(self.recipe, corpus)
        for line in auto_lines(given, self.recipe, corpus):
            print(line)
        self.run.start(self.recipe, provenance(self.recipe, corpus.meta, runtime))
        (self.path / "patterns").mkdir(exist_ok=True)
        for contender in self.contenders:
            if not self.pattern_file(contender).exists():
                write_yaml(self.pattern_file(contender), contender.content)
        networks = {contender.name: contender.key for contender in self.contenders}
        about = {"retrain": str(self.settings.retrain), "seeds": self.settings.seeds, "margin": self.settings.margin}
        write_yaml(self.path / SETTINGS, {"format": FORMAT, **about, "patterns": networks})
        return engine

    def tasks(self) -> list[Task]:
        """A task for each network and each of its seeds, ordered by seed."""
        tasks = {}
        for seed in dict.fromkeys(seed for contender in self.contenders for seed in contender.seeds):
            for contender in self.contenders:
                folder = self.path / "runs" / f"{contender.key}-{seed}"
                if seed not in contender.seeds or folder in tasks:
                    continue
                RunFolder(folder, replace(contender.config, seed=seed), "retrain", extra={"pattern": contender.blocks})
                arguments = [self.pattern_file(contender), self.settings.retrain, *self.overrides, f"seed={seed}"]
                log = self.path / "logs" / f"{folder.name}.txt"
                tasks[folder] = training_task(folder.name, arguments, folder, RESULTS, log)
        return list(tasks.values())

    def measure_latencies(self) -> None:
        """Write the latencies of all networks, unless all have been measured under the present conditions."""
        networks = {contender.key: contender for contender in self.contenders if contender.blocks}
        runtime, before = choose_runtime(self.recipe.train), read_latencies(self.path)
        now = device_conditions(self.recipe, runtime) | {"batch": [*batch_shape(self.recipe)]}
        if before["holds_for"] == now and networks.keys() <= before["networks"].keys():
            return
        print(f"measuring the latency of {len(networks)} networks", flush=True)
        models = {}
        for key, contender in networks.items():
            corpus = Corpus(prepare(contender.config.data))
            models[key] = contender.blocks, resolve_auto(contender.config, corpus), corpus
        found = text_times(models, runtime, ROUNDS) if models else {}
        times = {key: time["ms_per_1000_bytes"] for key, time in found.items()}
        write_yaml(self.path / LATENCIES, {"networks": times, "holds_for": now})
