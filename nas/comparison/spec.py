"""The specification of a comparison: COMPARISON.yaml, its contenders, and the paths of their files."""

import math
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from nas.core.errors import InputError, nearest
from nas.core.files import read_user_yaml
from nas.core.pattern import abbreviate, read_pattern
from nas.derivation.baselines import RULES

FORMAT = "par-comparison/1"
GIVEN, SEARCHED, PARAMETERS, RANDOM = "given", "searched", "parameters", "random"  # kinds of contenders
PATTERN_NAMES = (*RULES, PARAMETERS)
SAME_LATENCY = 0.03  # greatest relative difference between the latency of a random pattern and of the searched one
UNMATCHED, MATCHED = "", "-matched"  # suffixes of file names: the recipe's d_ffn, or equal parameters


@dataclass(frozen=True)
class Contender:
    """A pattern that is compared.

    Args:
        kind: GIVEN (by a rule or a file), SEARCHED, PARAMETERS or RANDOM.
        d_ffn: None for the recipe's d_ffn.
    """

    name: str
    kind: str
    blocks: list[str]
    d_ffn: int | None = None

    @property
    def key(self) -> str:
        """The name of its runs. Contenders with the same pattern share their runs."""
        return abbreviate(self.blocks) + ("" if self.d_ffn is None else f"-ffn{self.d_ffn}")


def random_names(searched: str, count: int) -> list[str]:
    """The names of the random patterns of a searched pattern: random-0.65-1 and so on for searched-0.65."""
    return [f"{RANDOM}{searched.removeprefix(SEARCHED)}-{number}" for number in range(1, count + 1)]


def is_random_of(name: str, searched: str) -> bool:
    """Whether a random pattern was drawn at the latency of this searched pattern."""
    return name.rpartition("-")[0] == RANDOM + searched.removeprefix(SEARCHED)


def training_folder(run: Path, contender: Contender, seed: int) -> Path:
    return run / "runs" / f"{contender.key}-{seed}"


def search_folder(run: Path, seed: int) -> Path:
    return run / f"search-{seed}"


def pattern_file(run: Path, name: str) -> Path:
    return run / "patterns" / f"{name}.yaml"


def settings_file(run: Path) -> Path:
    """A copy of the COMPARISON.yaml of the last call."""
    return run / "comparison.yaml"


def contenders_file(run: Path, suffix: str) -> Path:
    return run / f"contenders{suffix}.yaml"


@dataclass(frozen=True)
class Settings:
    """The content of COMPARISON.yaml. `python -m nas.compare --help` explains each key."""

    retrain: Path
    search: Path | None = None
    search_seeds: list[int] = field(default_factory=lambda: [1])
    budgets: list[float] = field(default_factory=list)
    trials: int = 0
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
        names = dict.fromkeys(self.searched, SEARCHED)
        names |= {PARAMETERS: PARAMETERS} if PARAMETERS in self.patterns else {}
        return names | {random: RANDOM for name in self.searched for random in random_names(name, self.random)}

    def seeds_of(self, kind: str) -> list[int]:
        """The seeds with which contenders of a kind are trained."""
        return self.random_seeds if kind == RANDOM and self.random_seeds else self.seeds


def read_settings(path: Path, overrides: dict) -> Settings:
    """Read and check COMPARISON.yaml. Raises InputError that names the mistake.

    Args:
        overrides: values from the command line, by key.
    """
    content = read_user_yaml(path, "the comparison")
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InputError(f"{path} is not a comparison: it needs `format: {FORMAT}` and `retrain: FILE.yaml`")
    known = [item.name for item in fields(Settings)]
    for key in content:
        if key not in known:
            raise InputError(f"{path}: unknown key {key!r}; the nearest is {nearest(key, known)!r}")
    for key in ("retrain", "search"):
        if not isinstance(content.get(key, None if key == "retrain" else ""), str):
            raise InputError(f"{path}: {key} must name a configuration file, not {content.get(key)!r}")
    settings = Settings(**content | overrides)
    check_values(path, settings)
    check_search(path, settings, "search_seeds" in content)
    if settings.search is None and not settings.patterns:
        raise InputError(f"{path}: patterns=[] and no search leave nothing to compare")
    return replace(settings, **{key: path.parent / content[key] for key in ("retrain", "search") if key in content})


def check_values(path: Path, settings: Settings) -> None:
    """Raises InputError if a value has the wrong type or range."""
    check_list(path, "seeds", settings.seeds, is_count, "different whole numbers from 0, such as [1, 2, 3]")
    check_list(path, "search_seeds", settings.search_seeds, is_count, "different whole numbers from 0, such as [1, 2]")
    allowed = "different ratios to the interleaved pattern's cost, of at most 4 decimals, such as [0.5, 0.65]"
    check_list(path, "budgets", settings.budgets, is_budget, allowed, empty=True)
    allowed = f"different names of {', '.join(PATTERN_NAMES)}, or pattern files"
    check_list(path, "patterns", settings.patterns, is_name, allowed, empty=True)
    if settings.random_seeds is not None:
        allowed = "different whole numbers from 0, such as [1]"
        check_list(path, "random_seeds", settings.random_seeds, is_count, allowed)
    for key in ("random", "trials"):
        if not is_count(getattr(settings, key)):
            raise InputError(f"{path}: {key}={getattr(settings, key)!r} must be a whole number from 0")


def check_search(path: Path, settings: Settings, has_seeds: bool) -> None:
    """Raises InputError if there is no search, but a key needs one. has_seeds: whether `search_seeds` is given."""
    parameters = PARAMETERS in settings.patterns
    keys = {"budgets": settings.budgets, PARAMETERS: parameters, RANDOM: settings.random, "search_seeds": has_seeds}
    keys["trials"] = settings.trials
    needed = ", ".join(key for key, given in keys.items() if given)
    if settings.search is None and needed:
        raise InputError(f"{path}: {needed} needs a search: add `search: FILE.yaml`, or remove the key")


def is_count(value) -> bool:
    return type(value) is int and value >= 0


def is_budget(value) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf and round(value, 4) == value


def is_name(value) -> bool:
    return isinstance(value, str) and value != ""


def check_list(path: Path, key: str, values, is_valid, allowed: str, empty: bool = False) -> None:
    valid = isinstance(values, list) and all(map(is_valid, values)) and len(set(values)) == len(values)
    if not valid or not (values or empty):
        raise InputError(f"{path}: {key}={values!r} must be {allowed}")


def given_contenders(settings: Settings, path: Path, blocks: int) -> list[Contender]:
    """The contenders that need no search: patterns by rule, with `blocks` blocks, and from files.

    Raises InputError if a name is unknown or used twice, or if a pattern has another number of blocks.
    """
    given = []
    for name in settings.patterns:
        if name in RULES:
            given.append(Contender(name, GIVEN, RULES[name](blocks)))
        elif name != PARAMETERS:
            given.append(read_contender(path, name, blocks))
    names = [*(contender.name for contender in given), *settings.derived_names]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{path}: two patterns are called {name!r}; names must differ: rename a file")
    return given


def read_contender(path: Path, name: str, blocks: int) -> Contender:
    """The contender in the pattern file `name`, relative to COMPARISON.yaml at `path`."""
    file = path.parent / name
    if not file.exists() and file.suffix not in (".yaml", ".yml"):
        raise InputError(
            f"{path}: patterns: {name!r} is neither a file nor one of {', '.join(PATTERN_NAMES)}; the nearest is "
            f"{nearest(name, PATTERN_NAMES)!r}"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", file.stem):
        raise InputError(
            f"{path}: patterns: {name!r}: the file name must begin with a letter or digit and consist of letters, "
            "digits, `-`, `_` and `.`"
        )
    pattern = read_pattern(file)["blocks"]
    if len(pattern) != blocks:
        raise InputError(
            f"{path}: patterns: {file} has {len(pattern)} blocks, but model.blocks is {blocks}; they must match"
        )
    return Contender(file.stem, GIVEN, pattern)
