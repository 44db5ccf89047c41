"""The specification of a comparison: COMPARISON.yaml, its contenders, and the names of their files."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nas.core.config import Config, flat_config
from nas.core.errors import InputError, nearest
from nas.core.files import read_user_yaml
from nas.core.pattern import SHAPE_OPTIONS, differing_shape, file_name, read_pattern
from nas.costs.baselines import RULES

FORMAT = "par-comparison/1"
GIVEN, SEARCHED, RANDOM = "given", "searched", "random"  # kinds of contenders
SAME_LATENCY = 0.03  # greatest relative difference between the latency of a random pattern and of the searched one
SETTINGS = "comparison.yaml"  # in the run folder: a copy of the COMPARISON.yaml of the last call


@dataclass(frozen=True)
class Contender:
    """A pattern that is compared. kind: GIVEN (by a rule or a file), SEARCHED or RANDOM."""

    name: str
    kind: str
    blocks: list[str]

    @property
    def key(self) -> str:
        """The name of its runs. Contenders with the same pattern share their runs."""
        return file_name(self.blocks)


def random_names(searched: str, count: int) -> list[str]:
    """The names of the random patterns of a searched pattern: random-0.65-1 and so on for searched-0.65."""
    return [f"{RANDOM}{searched.removeprefix(SEARCHED)}-{number}" for number in range(1, count + 1)]


def is_random_of(name: str, searched: str) -> bool:
    """Whether a random pattern was drawn at the latency of this searched pattern."""
    return name.rpartition("-")[0] == RANDOM + searched.removeprefix(SEARCHED)


def pattern_file(run: Path, name: str) -> Path:
    return run / "patterns" / f"{name}.yaml"


@dataclass(frozen=True)
class Settings:
    """The content of COMPARISON.yaml. `python -m nas.compare --help` explains each key."""

    retrain: Path
    search: Path | None = None
    search_seeds: list[int] = field(default_factory=lambda: [1])
    budgets: list[float] = field(default_factory=list)
    patterns: list[str] = field(default_factory=lambda: ["interleaved"])
    random: int = 0
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    random_seeds: list[int] | None = None

    @property
    def searched(self) -> dict[str, float | None]:
        """{name: budget} of the searched patterns; without `budgets` there is one, and its budget is None."""
        if not self.search:
            return {}
        return {f"{SEARCHED}-{budget:g}": budget for budget in sorted(self.budgets)} or {SEARCHED: None}

    @property
    def derived_names(self) -> dict[str, str]:
        """{name: kind} of the contenders that depend on a search, in order."""
        random = [name for searched in self.searched for name in random_names(searched, self.random)]
        return dict.fromkeys(self.searched, SEARCHED) | dict.fromkeys(random, RANDOM)

    def seeds_of(self, kind: str) -> list[int]:
        """The seeds with which contenders of a kind are trained."""
        return self.random_seeds if kind == RANDOM and self.random_seeds else self.seeds


def is_count(value) -> bool:
    return type(value) is int and value >= 0


def is_budget(value) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf and round(value, 4) == value


def is_name(value) -> bool:
    return isinstance(value, str) and value != ""


def list_of(is_valid: Callable, least: int = 1) -> Callable:
    """A check of a list of at least `least` different values."""

    def check(values) -> bool:
        valid = isinstance(values, list) and len(values) >= least and all(map(is_valid, values))
        return valid and len(set(values)) == len(values)

    return check


SEEDS = list_of(is_count), "different whole numbers from 0, such as [1, 2, 3]"
BUDGETS = "different ratios to the interleaved pattern's cost, of at most 4 decimals, such as [0.5, 0.65]"
CHECKS = {  # of the keys of COMPARISON.yaml: (is a value valid?, what is allowed)
    **dict.fromkeys(("retrain", "search"), (is_name, "the name of a configuration file")),
    "random": (is_count, "a whole number from 0"),
    **dict.fromkeys(("seeds", "search_seeds", "random_seeds"), SEEDS),
    "budgets": (list_of(is_budget, 0), BUDGETS),
    "patterns": (list_of(is_name, 0), f"different names of {', '.join(RULES)}, or pattern files"),
}


def read_settings(path: Path, overrides: dict) -> Settings:
    """Read and check COMPARISON.yaml. Raises InputError that names the mistake.

    Args:
        overrides: values from the command line, by key.
    """
    content = read_user_yaml(path, "the comparison")
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InputError(f"{path} is not a comparison: it needs `format: {FORMAT}` and `retrain: FILE.yaml`")
    content = {"retrain": None} | content | overrides
    for key, value in content.items():
        if key not in CHECKS:
            raise InputError(f"{path}: unknown key {key!r}; the nearest is {nearest(key, CHECKS)!r}")
        is_valid, allowed = CHECKS[key]
        if not is_valid(value):
            raise InputError(f"{path}: {key}={value!r} must be {allowed}")
    if "search" not in content:
        if needed := [key for key in ("budgets", "random", "search_seeds") if content.get(key)]:
            raise InputError(f"{path}: {needed[0]} needs a search: add `search: FILE.yaml`, or remove the key")
        if content.get("patterns") == []:
            raise InputError(f"{path}: patterns=[] and no search leave nothing to compare")
    files = {key: path.parent / content[key] for key in ("retrain", "search") if key in content}
    return Settings(**content | files)


def given_contenders(settings: Settings, path: Path, blocks: int, recipe: Config) -> list[Contender]:
    """The contenders that need no search: patterns by rule, with `blocks` blocks, and from files.

    Raises InputError if a name is unknown or used twice, or if a pattern has another number of blocks or another width.
    """
    given = [
        Contender(name, GIVEN, RULES[name](blocks)) if name in RULES else read_contender(path, name, blocks, recipe)
        for name in settings.patterns
    ]
    names = [*(contender.name for contender in given), *settings.derived_names]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{path}: two patterns are called {name!r}; names must differ: rename a file")
    return given


def read_contender(path: Path, name: str, blocks: int, recipe: Config) -> Contender:
    """The contender in the pattern file `name`, relative to COMPARISON.yaml at `path`."""
    file, mistake = path.parent / name, f"{path}: patterns: {name!r}"
    if not file.exists() and file.suffix not in (".yaml", ".yml"):
        known = f"neither a file nor one of {', '.join(RULES)}; the nearest is {nearest(name, RULES)!r}"
        raise InputError(f"{mistake} is {known}")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", file.stem):
        allowed = "begin with a letter or digit and consist of letters, digits, `-`, `_` and `.`"
        raise InputError(f"{mistake}: the file name must {allowed}")
    content = read_pattern(file)
    pattern, values = content["blocks"], flat_config(asdict(recipe))
    for key in differing_shape(content, values):
        option = SHAPE_OPTIONS[key]
        raise InputError(f"{mistake} has {key}={content[key]}, but {option} is {values[option]}; they must match")
    if len(pattern) != blocks:
        raise InputError(f"{mistake} has {len(pattern)} blocks, but model.blocks is {blocks}; they must match")
    return Contender(file.stem, GIVEN, pattern)
