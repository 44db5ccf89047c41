"""A comparison at work: searches, patterns that follow from them, training, timing. No part is done twice."""

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch

from nas.comparison.results import known_latencies, write_contenders
from nas.comparison.spec import (
    GIVEN,
    PARAMETERS,
    RANDOM,
    SAME_LATENCY,
    SEARCHED,
    Contender,
    Settings,
    not_found_file,
    pattern_file,
    search_folder,
    settings_file,
    training_folder,
)
from nas.comparison.tasks import ALONE, Share, Task, run_tasks, unfinished, wait_for
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_text, write_yaml
from nas.core.pattern import FORMAT, abbreviate, interleaved, network, read_pattern
from nas.core.provenance import provenance
from nas.core.run_folder import OUTCOME, RESULTS, open_run
from nas.costs.latency import ROUNDS, conditions, current_costs, measure_models
from nas.costs.table import CostTable
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.derivation.baselines import most_parameters, random_patterns
from nas.training.build import count_parameters, resolve_cutoffs
from nas.training.device import set_up_device

ROOT = Path(__file__).resolve().parents[2]  # where the scripts stand


REPORTED_ROUNDS = 60  # for the figures that are reported


DRAWN_AT_ONCE, TRIES = 2, 10  # patterns that are timed for each that is still wanted; how often


def visible_gpus(config: Config) -> list[str]:
    """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them; none where they are to use the CPU."""
    if config.train.device == "cpu":
        return []
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA takes names up to the first that is none, such as -1: so many are counted.
    return [str(number) for number in range(count)] if named is None else named.split(",")[:count]


class Timer:
    """Latencies of patterns of so many blocks, under the recipe that trains them."""

    def __init__(self, recipe: Config, operations: list[str], blocks: int, counts: np.ndarray):
        """operations: of the table; counts [V]: how often the training text has each token."""
        self.config, self.counts = copy.deepcopy(recipe), counts
        self.config.search.operations, self.config.model.blocks = operations, blocks

    def table(self, kept: Path) -> CostTable:
        """Milliseconds of each operation: the file's where they hold for this device, else measured, and kept there."""
        table = current_costs(self.config, self.counts, kept)
        table.write(kept)
        return table

    def measure(self, contenders: list[Contender], rounds: int) -> dict[str, dict]:
        """{contender's key: latency}, all in the same rounds, with the ratio to the interleaved pattern at the recipe's
        d_ffn."""
        usual = Contender("", GIVEN, interleaved(self.config.model.blocks))
        different = {contender.key: contender for contender in [usual, *contenders]}
        models = [(contender.blocks, at_d_ffn(self.config, contender.d_ffn)) for contender in different.values()]
        return dict(zip(different, measure_models(models, self.counts, rounds), strict=True))

    def measure_once(self, contenders: list[Contender], before: dict) -> dict:
        """{"patterns": {contender's key: latency}, "holds_for": conditions}; `before`, what was measured then, where
        that holds all of them under the conditions of now."""
        now = conditions(self.config, len(self.counts), sorted({name for c in contenders for name in c.blocks}))
        wanted = {contender.key for contender in contenders}
        if before.get("holds_for") == now and wanted <= before["patterns"].keys():
            return before
        print(f"measuring the latency of {len(wanted)} patterns, in rounds", flush=True)
        return {"patterns": self.measure(contenders, REPORTED_ROUNDS), "holds_for": now}


def at_d_ffn(config: Config, d_ffn: int | None) -> Config:
    """A copy, with another d_ffn unless that is None."""
    config = copy.deepcopy(config)
    config.model.d_ffn = config.model.d_ffn if d_ffn is None else d_ffn
    return config


class Comparison:
    """All that one RUN_DIR holds: search-SEED/, patterns/, runs/PATTERN-SEED/, logs/."""

    def __init__(
        self,
        settings: Settings,
        given: list[Contender],
        recipe: Config,
        search: Config | None,
        path: Path,
        overrides: list[str],
        share: Share = ALONE,
    ):
        """given: contenders that wait for no search; share: what this process does of searches and training. Raises
        InputError where runs in the folder do not fit, before anything is written."""
        self.settings, self.given, self.path, self.overrides = settings, given, path, overrides
        self.share = share
        self.recipe, self.search, self.blocks = recipe, search, (search or recipe).model.blocks
        extra = {"search_seeds": settings.search_seeds if search else None}
        self.run = open_run(path, recipe, "compare", resume=True, extra=extra)
        self.recipe = self.run.resolve_auto(recipe)
        self.check_derived()
        self.training(self.known())  # that all can go on
        self.searches()

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus(prepare(self.recipe.data))

    @cached_property
    def timer(self) -> Timer:
        operations = self.search.search.operations if self.search else sorted({n for c in self.given for n in c.blocks})
        return Timer(self.recipe, operations, self.blocks, self.corpus.counts())

    def start(self, text: str) -> None:
        """Prepare the data, and take the folder for this process alone; other shares wait until share 0 has.

        text: of COMPARISON.yaml. Its copy is written last, and so says that all is there.
        """
        kept = settings_file(self.path)
        if not self.share.leads:
            wait_for(
                "share 0", lambda: [] if kept.exists() and kept.read_text(encoding="utf-8") == text else [str(kept)]
            )
            for contender in self.given:
                self.check_pattern(contender)
            return
        context = set_up_device(self.recipe.seed, self.recipe.train)
        resolve_cutoffs(self.recipe, self.corpus)
        self.run.start(self.recipe, provenance(self.recipe, self.corpus.meta, context))
        for contender in self.given:
            self.write_pattern(contender)
        write_text(kept, text)

    # --- tasks

    @property
    def search_folders(self) -> dict[int, Path]:
        seeds = self.settings.search_seeds if self.search else []
        return {seed: search_folder(self.path, seed) for seed in seeds}

    def searches(self) -> list[Task]:
        found = []
        for position, (seed, folder) in enumerate(self.search_folders.items()):
            options = ["--run", folder, "--resume", *self.overrides, f"seed={seed}"]
            arguments = [self.settings.search, *options]
            found.append(self.task(folder.name, "search.py", arguments, folder / OUTCOME, position))
            if self.share.has(found[-1]):  # what another process writes to cannot be checked
                open_run(folder, replace(self.search, seed=seed), "search", resume=True)
        return found

    def training(self, contenders: list[Contender]) -> list[Task]:
        """A run for each seed and each pattern, first all patterns of one seed. Positions are counted over all that
        have a name, found or not, so that every process counts alike at any time."""
        names = [*(contender.name for contender in self.given), *self.settings.derived_names]
        positions = {pair: position for position, pair in enumerate(product(self.settings.seeds, names))}
        found = {}
        for seed, contender in product(self.settings.seeds, contenders):
            folder = training_folder(self.path, contender, seed)
            if folder in found:  # of two names for one pattern, the first counts
                continue
            own = [f"seed={seed}", *([] if contender.d_ffn is None else [f"model.d_ffn={contender.d_ffn}"])]
            files = [pattern_file(self.path, contender.name), self.settings.retrain]
            arguments = [*files, "--run", folder, "--resume", *self.overrides, *own]
            position = positions[seed, contender.name]
            found[folder] = self.task(folder.name, "retrain.py", arguments, folder / RESULTS, position)
            if self.share.has(found[folder]):
                config = replace(at_d_ffn(self.recipe, contender.d_ffn), seed=seed)
                open_run(folder, config, "retrain", resume=True, extra={"pattern": contender.blocks})
        return list(found.values())

    def task(self, name: str, script: str, arguments: list, result: Path, position: int = 0) -> Task:
        file = ROOT / script
        if file.is_relative_to(Path.cwd()):  # so that what a run says of its command holds elsewhere too
            file = file.relative_to(Path.cwd())
        command = [sys.executable, str(file), *map(str, arguments)]
        return Task(name, command, result, self.path / "logs" / f"{name}.txt", position)

    # --- patterns

    def check_pattern(self, contender: Contender) -> None:
        """Raises InputError where another pattern already has the name."""
        file = pattern_file(self.path, contender.name)
        if file.exists() and read_pattern(file)["blocks"] != contender.blocks:
            raise InputError(
                f"{file} is another pattern than {abbreviate(contender.blocks)}; name another --run folder"
            )

    def write_pattern(self, contender: Contender, **about) -> None:
        """Raises InputError where another pattern already has the name."""
        self.check_pattern(contender)
        file = pattern_file(self.path, contender.name)
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            origin = {"method": contender.kind, **about}
            write_yaml(file, {"format": FORMAT, "blocks": contender.blocks, "derived_from": origin})

    def known(self) -> list[Contender]:
        """The given ones, and of those that follow from searches the ones that have been found."""
        found = list(self.given)
        for name, kind in self.settings.derived_names.items():
            file = pattern_file(self.path, name)
            if file.exists():
                found.append(Contender(name, kind, read_pattern(file)["blocks"]))
        return found

    def check_derived(self) -> None:
        """Raises InputError where the patterns of budgets were derived in another way than the settings say."""
        wanted = self.settings.method, bool(self.settings.trials)
        for name in self.settings.budgets.values():
            file = pattern_file(self.path, name)
            if file.exists():
                origin = read_pattern(file)["derived_from"]
                found = origin["method"], bool(origin.get("evolution", {}).get("trials"))
                if found != wanted:
                    ways = [f"{how} {'with' if trials else 'without'} trials" for how, trials in (found, wanted)]
                    raise InputError(f"{file} was derived by {ways[0]}, not by {ways[1]}; name another --run folder")

    def awaited(self) -> list[str]:
        """Of the patterns that searches lead to, those that are neither found nor known not to be."""
        file = not_found_file(self.path)
        given_up = read_yaml(file)["names"] if file.exists() else []
        names = [name for name in self.settings.derived_names if name not in given_up]
        return [name for name in names if not pattern_file(self.path, name).exists()]

    def find_patterns(self, run: Callable[[list[Task]], dict], early: list[Contender]) -> dict[str, str]:
        """Search, derive and choose rivals; other shares wait until share 0 has. Returns what failed.

        run: does this share of some tasks. early: patterns that wait for nothing and train beside the searches; when
        rivals are timed, nothing else runs, and lest others wait for that too, share 0 trains later.
        """
        searches = self.searches()
        failed = run([*searches, *(self.training(early) if self.share.alone or not self.share.leads else [])])
        if not self.search or any(task.name in failed for task in searches):
            return failed
        if not self.share.leads:
            wait_for("share 0", self.awaited)
            return failed
        wait_for("other shares", lambda: unfinished(searches))
        # Among shares, what was not found is not sought again: those that train already would not know of it.
        if self.share.alone or self.awaited():
            failed |= self.derive()
            if pattern_file(self.path, SEARCHED).exists():
                self.choose_rivals()
        return failed

    def derive(self) -> dict[str, str]:
        """Find the searched patterns that are missing, of argmax and of each budget. Returns what failed."""
        out = pattern_file(self.path, SEARCHED)
        out.parent.mkdir(exist_ok=True)
        wanted = {SEARCHED: ["--out", out]}
        for budget, name in self.settings.budgets.items():
            file = pattern_file(self.path, name)
            how = ["--method", self.settings.method, "--latency-budget", budget]
            trials = ["--trials", self.settings.trials] if self.settings.trials else []
            wanted[name] = [*how, *trials, "--out", file]
        runs = self.search_folders.values()
        tasks = [
            self.task(f"derive-{name}", "derive.py", [*runs, *options], pattern_file(self.path, name))
            for name, options in wanted.items()
        ]
        return run_tasks(tasks, workers=1)

    def choose_rivals(self) -> None:
        """Those chosen by the searched pattern's latency: the most parameters, and random ones."""
        names = [name for name, kind in self.settings.derived_names.items() if kind in (PARAMETERS, RANDOM)]
        missing = [name for name in names if not pattern_file(self.path, name).exists()]
        if missing:
            searched = next(contender for contender in self.known() if contender.name == SEARCHED)
            table = self.timer.table(self.path / "latency.yaml")
            if PARAMETERS in missing:
                self.choose_richest(table, table.pattern(searched.blocks))
            left = self.draw([name for name in missing if name != PARAMETERS], table, searched)
            write_yaml(not_found_file(self.path), {"names": left})

    def choose_richest(self, table: CostTable, budget: float) -> None:
        operations = self.search.search.operations
        sizes = {name: self.parameters([name]) - self.parameters([]) for name in operations}
        blocks = most_parameters(self.blocks, operations, sizes, table, budget)
        about = {"predicted_ratio_to_searched": round(table.pattern(blocks) / budget, 4)}
        self.write_pattern(Contender(PARAMETERS, PARAMETERS, blocks), **about)

    def parameters(self, blocks: list[str], d_ffn: int | None = None) -> int:
        return count_parameters(blocks, at_d_ffn(self.recipe, d_ffn), self.corpus.vocab_size)

    def draw(self, names: list[str], table: CostTable, searched: Contender) -> list[str]:
        """Random patterns: drawn by predicted latency, kept where the measured one too is within 3% of the searched
        pattern's. Returns the names for which there was none."""
        seen = {network(other.blocks) for other in self.known() if other.kind in (SEARCHED, RANDOM)}
        target, names = table.pattern(searched.blocks), list(names)
        drawn = random_patterns(self.blocks, self.search.search.operations, table, target, SAME_LATENCY, seed=0)
        fresh = (blocks for blocks in drawn if network(blocks) not in seen)
        for _ in range(TRIES):
            batch = [Contender("", RANDOM, blocks) for blocks in islice(fresh, DRAWN_AT_ONCE * len(names))]
            if not batch:
                break
            times = self.timer.measure([searched, *batch], ROUNDS)
            for contender in batch:
                measured = times[contender.key]["median_ms"] / times[searched.key]["median_ms"]
                if names and abs(measured - 1) <= SAME_LATENCY:
                    ratios = {"predicted_ratio": table.pattern(contender.blocks) / target, "measured_ratio": measured}
                    about = {"at_latency_of": abbreviate(searched.blocks)} | {k: round(r, 4) for k, r in ratios.items()}
                    self.write_pattern(replace(contender, name=names[0]), **about)
                    print(f"drew {names.pop(0)}: {contender.key}, {measured:.3f} of the searched pattern's latency")
        if names:
            few = "few have the searched one's latency; a repetition without --share tries again"
            print(f"NOTICE: no pattern was found for {', '.join(names)}: {few}")
        return names

    def matched(self, contenders: list[Contender]) -> list[Contender]:
        """With d_ffn such that all have the interleaved pattern's parameters, as nearly as whole numbers allow: without
        attention's parameters, dense blocks can be wider."""
        usual, found = self.parameters(interleaved(self.blocks)), []
        for contender in contenders:
            one, two = (self.parameters(contender.blocks, d_ffn) for d_ffn in (1, 2))
            if one == two or one > usual:
                print(f"NOTICE: no d_ffn gives {contender.name} the interleaved pattern's parameters; it is left out")
                continue
            d_ffn = 1 + round((usual - one) / (two - one))
            found.append(replace(contender, d_ffn=None if d_ffn == self.recipe.model.d_ffn else d_ffn))
        return found

    # --- figures

    def record(self, contenders: list[Contender], path: Path, measure: bool) -> None:
        """Write what is compared, with latencies: measured now where `measure` and those of before do not hold."""
        latencies = known_latencies(path)
        if measure:
            latencies = self.timer.measure_once(contenders, latencies)
        hours = {contender.name: self.search_hours(contender) for contender in contenders}
        write_contenders(path, contenders, self.settings.seeds, hours, latencies)

    def search_hours(self, contender: Contender) -> float:
        """Of all searches together and, where that takes long, the contender's own derivation; 0 for the others."""
        if contender.kind != SEARCHED:
            return 0.0
        seconds = [read_yaml(folder / OUTCOME)["wall_time_s"] for folder in self.search_folders.values()]
        origin = read_pattern(pattern_file(self.path, contender.name))["derived_from"]
        return (sum(seconds) + origin.get("evolution", {}).get("seconds", 0)) / 3600
