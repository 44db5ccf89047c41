"""A comparison at work: searches, patterns that follow from them, training, timing. No part is done twice."""

import copy
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from models.transformer_xl import build_pattern
from nas.assembly import backbone_options, model_sizes, settle_cutoffs
from nas.baselines import most_parameters, random_patterns
from nas.claims import known_latencies, write_comparison
from nas.comparison import PARAMETERS, RANDOM, SEARCHED, Contender, Settings
from nas.config import Config
from nas.costs import CostTable
from nas.data import Corpus
from nas.device import set_up
from nas.errors import InputError, RunError
from nas.jobs import Task, last_line, run_tasks
from nas.latency import conditions, current_costs, measure_models
from nas.pattern import FORMAT, abbreviate, dump_pattern, interleaved, network, read_pattern
from nas.prepare import prepare
from nas.record import open_run, provenance, read_yaml, write_text

ROOT = Path(__file__).resolve().parents[1]  # where the scripts stand
SAME_LATENCY = 0.03  # how far, as a share, a random pattern's latency may be from the searched one's
DRAWN_AT_ONCE, TRIES = 2, 10  # patterns that are timed for each that is still wanted; how often


class Timer:
    """Sizes and latencies of patterns under the recipe that trains them."""

    def __init__(self, recipe: Config, operations: list[str], blocks: int, kept: Path):
        """kept: file for the table of latencies."""
        device, threads = set_up(recipe.seed, recipe.train.threads)
        corpus = Corpus(prepare(recipe.data))
        settle_cutoffs(recipe, corpus)
        self.provenance = provenance(recipe, corpus.meta, device, threads)
        self.config, self.counts, self.kept = copy.deepcopy(recipe), corpus.counts(), kept
        self.config.search.operations, self.config.model.blocks = operations, blocks

    def table(self) -> CostTable:
        """Milliseconds of each operation, kept where they hold for this device."""
        table = current_costs(self.config, self.counts, self.kept)
        table.write(self.kept)
        return table

    def at(self, d_ffn: int | None) -> Config:
        config = copy.deepcopy(self.config)
        config.model.d_ffn = self.config.model.d_ffn if d_ffn is None else d_ffn
        return config

    def parameters(self, blocks: list[str], d_ffn: int | None = None) -> int:
        with torch.device("meta"):  # shapes alone are needed
            options = backbone_options(self.config, len(self.counts))
            model = build_pattern(blocks, model_sizes(self.at(d_ffn)), len(self.counts), **options)
        return sum(parameter.numel() for parameter in model.parameters())

    def measure(self, contenders: list[Contender]) -> dict[str, dict]:
        """{contender's key: latency}, all in the same rounds, with the ratio to the interleaved pattern at the recipe's
        d_ffn."""
        usual = Contender("interleaved", "given", interleaved(self.config.model.blocks))
        different = {contender.key: contender for contender in [usual, *contenders]}
        models = [(contender.blocks, self.at(contender.d_ffn)) for contender in different.values()]
        return dict(zip(different, measure_models(models, self.counts), strict=True))

    def measure_once(self, contenders: list[Contender], known: dict) -> dict:
        """{"patterns": {contender's key: latency}, "holds_for": conditions}; `known`, what was measured before, where
        that holds all of them under the conditions of now."""
        now = conditions(self.config, len(self.counts), sorted({name for c in contenders for name in c.blocks}))
        wanted = {contender.key for contender in contenders}
        if known.get("holds_for") == now and wanted <= known["patterns"].keys():
            return known
        print(f"measuring the latency of {len(wanted)} patterns, in rounds", flush=True)
        return {"patterns": self.measure(contenders), "holds_for": now}


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
    ):
        """given: contenders that wait for no search. Raises InputError where runs in the folder do not fit, before
        anything is written."""
        self.settings, self.given, self.path, self.overrides = settings, given, path, overrides
        self.recipe, self.search, self.blocks = recipe, search, (search or recipe).model.blocks
        extra = {"search_seeds": settings.search_seeds if search else None}
        self.run = open_run(path, recipe, "compare", resume=True, extra=extra)
        self.training(self.known(), settings.seeds)
        self.searches()
        operations = search.search.operations if search else sorted({name for c in given for name in c.blocks})
        self.timer = Timer(recipe, operations, self.blocks, path / "latency.yaml")

    def start(self) -> None:
        """Take the folder for this process alone."""
        self.run.start(self.timer.provenance)
        for contender in self.given:
            self.write_pattern(contender)

    # --- tasks

    @property
    def search_folders(self) -> dict[int, Path]:
        return {seed: self.path / f"search-{seed}" for seed in self.settings.search_seeds} if self.search else {}

    def searches(self) -> list[Task]:
        found = []
        for seed, folder in self.search_folders.items():
            open_run(folder, replace(self.search, seed=seed), "search", resume=True)  # that it can go on
            options = ["--run", folder, "--resume", *self.overrides, f"seed={seed}"]
            found.append(self.task(folder.name, "search.py", [self.settings.search, *options], folder / "outcome.yaml"))
        return found

    def training(self, contenders: list[Contender], seeds: list[int]) -> list[Task]:
        """A run for each seed and each pattern, first all patterns of one seed."""
        found = {}
        for seed in seeds:
            for contender in contenders:
                name, config = f"{contender.key}-{seed}", copy.deepcopy(self.recipe)
                folder, config.seed, own = self.path / "runs" / name, seed, [f"seed={seed}"]
                if contender.d_ffn is not None:
                    config.model.d_ffn = contender.d_ffn
                    own.append(f"model.d_ffn={contender.d_ffn}")
                open_run(folder, config, "retrain", resume=True, extra={"pattern": contender.blocks})
                files = [self.pattern_file(contender.name), self.settings.retrain]
                options = ["--run", folder, "--resume", *self.overrides, *own]
                found[name] = self.task(name, "retrain.py", [*files, *options], folder / "results.yaml")
        return list(found.values())

    def task(self, name: str, script: str, arguments: list, result: Path) -> Task:
        file = ROOT / script
        if file.is_relative_to(Path.cwd()):  # so that what a run says of its command holds elsewhere too
            file = file.relative_to(Path.cwd())
        command = [sys.executable, str(file), *map(str, arguments)]
        return Task(name, command, result, self.path / "logs" / f"{name}.txt")

    # --- patterns

    def pattern_file(self, name: str) -> Path:
        return self.path / "patterns" / f"{name}.yaml"

    def write_pattern(self, contender: Contender, **about) -> None:
        """Raises InputError where another pattern already has the name."""
        file = self.pattern_file(contender.name)
        file.parent.mkdir(exist_ok=True)
        if file.exists() and read_pattern(file)["blocks"] != contender.blocks:
            raise InputError(
                f"{file} is another pattern than {abbreviate(contender.blocks)}; name another --run folder"
            )
        if not file.exists():
            origin = {"method": contender.kind, **about}
            write_text(file, dump_pattern({"format": FORMAT, "blocks": contender.blocks, "derived_from": origin}))

    def known(self) -> list[Contender]:
        """The given ones, and of those that follow from searches the ones that have been found."""
        found = list(self.given)
        for name, kind in self.settings.derived_names.items():
            if self.pattern_file(name).exists():
                found.append(Contender(name, kind, read_pattern(self.pattern_file(name))["blocks"]))
        return found

    def derive(self) -> Contender:
        """Find the searched patterns, of argmax and of each budget; returns the former. Raises RunError where derive.py
        fails."""
        out = self.pattern_file(SEARCHED)
        budgets = [f"{budget:g}" for budget in self.settings.pareto]
        for names, options in ([""], []), ([f"-{b}" for b in budgets], ["--pareto", ",".join(budgets)]):
            files = [self.pattern_file(f"{SEARCHED}{name}") for name in names]
            if not all(file.exists() for file in files):
                task = self.task(
                    "derive", "derive.py", [*self.search_folders.values(), "--out", out, *options], files[-1]
                )
                if run_tasks([task], workers=1):
                    raise RunError(f"derive.py failed: {last_line(task.log)} (all it said is in {task.log})")
        return Contender(SEARCHED, SEARCHED, read_pattern(out)["blocks"])

    def choose_rivals(self, searched: Contender) -> None:
        """Those chosen by the searched pattern's latency: the most parameters, and random ones."""
        missing = [name for name in self.settings.derived_names if not self.pattern_file(name).exists()]
        if missing:
            table = self.timer.table()
            if PARAMETERS in missing:
                self.choose_richest(table, table.pattern(searched.blocks))
            self.draw([name for name in missing if name != PARAMETERS], table, searched)

    def choose_richest(self, table: CostTable, budget: float) -> None:
        operations = self.search.search.operations
        sizes = {name: self.timer.parameters([name]) - self.timer.parameters([]) for name in operations}
        blocks = most_parameters(self.blocks, operations, sizes, table, budget)
        about = {"predicted_ratio_to_searched": round(table.pattern(blocks) / budget, 4)}
        self.write_pattern(Contender(PARAMETERS, PARAMETERS, blocks), **about)

    def draw(self, names: list[str], table: CostTable, searched: Contender) -> None:
        """Random patterns: drawn by predicted latency, kept where the measured one too is within 3% of the searched
        pattern's."""
        known = {network(other.blocks) for other in self.known() if other.kind in (SEARCHED, RANDOM)}
        target, names = table.pattern(searched.blocks), list(names)
        drawn = random_patterns(self.blocks, self.search.search.operations, table, target, SAME_LATENCY, seed=0)
        fresh = (blocks for blocks in drawn if network(blocks) not in known)
        for _ in range(TRIES):
            batch = [Contender("", RANDOM, blocks) for blocks in islice(fresh, DRAWN_AT_ONCE * len(names))]
            if not batch:
                break
            times = self.timer.measure([searched, *batch])
            for contender in batch:
                measured = times[contender.key]["median_ms"] / times[searched.key]["median_ms"]
                if names and abs(measured - 1) <= SAME_LATENCY:
                    ratios = {"predicted_ratio": table.pattern(contender.blocks) / target, "measured_ratio": measured}
                    about = {"at_latency_of": abbreviate(searched.blocks)} | {k: round(r, 4) for k, r in ratios.items()}
                    self.write_pattern(replace(contender, name=names.pop(0)), **about)
        if names:
            print(f"NOTICE: no pattern was found for {', '.join(names)}: few have the searched one's latency")

    def matched(self, contenders: list[Contender]) -> list[Contender]:
        """With d_ffn such that all have the interleaved pattern's parameters, as nearly as whole numbers allow: without
        attention's parameters, dense blocks can be wider."""
        usual, found = self.timer.parameters(interleaved(self.blocks)), []
        for contender in contenders:
            one, two = (self.timer.parameters(contender.blocks, d_ffn) for d_ffn in (1, 2))
            if one == two:
                print(f"NOTICE: {contender.name} has no dense block whose d_ffn could match parameters; it is left out")
                continue
            d_ffn = max(1, 1 + round((usual - one) / (two - one)))
            found.append(replace(contender, d_ffn=None if d_ffn == self.recipe.model.d_ffn else d_ffn))
        return found

    def record(self, contenders: list[Contender], path: Path, measure: bool) -> None:
        """Write what is compared, with latencies: measured now where `measure` and those of before do not hold."""
        latencies = known_latencies(path) if path.exists() else {}
        if measure:
            latencies = self.timer.measure_once(contenders, latencies)
        write_comparison(path, contenders, self.settings.seeds, self.search_hours(), latencies)

    def search_hours(self) -> float:
        """Of all searches together; 0 where there are none."""
        outcomes = [folder / "outcome.yaml" for folder in self.search_folders.values()]
        return sum(read_yaml(path)["wall_time_s"] for path in outcomes if path.exists()) / 3600
