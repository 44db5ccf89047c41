"""What is compared: the contenders, as COMPARISON.yaml names them, and where their files are kept. No torch."""

import difflib
import math
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import read_user_yaml
from nas.core.pattern import abbreviate, read_pattern
from nas.derivation.baselines import RULES

FORMAT = "par-comparison/1"


GIVEN, SEARCHED, PARAMETERS, RANDOM = "given", "searched", "parameters", "random"  # kinds, and names, of contenders


PATTERN_NAMES = (*RULES, PARAMETERS)


SAME_LATENCY = 0.03  # how far, as a share, a random pattern's latency may be from the searched one's


METHODS = ("budget", "evolution")  # of derive.py, for the budgets of pareto


UNMATCHED, MATCHED = "", "-matched"  # marks of files: at the recipe's d_ffn, and at equal parameters


@dataclass(frozen=True)
class Contender:
    """A pattern that is compared.

    kind: given (by a rule or a file), searched, parameters or random; d_ffn: where it is not the recipe's own.
    """

    name: str
    kind: str
    blocks: list[str]
    d_ffn: int | None = None

    @property
    def key(self) -> str:
        """What its runs are called by: contenders of one pattern share them."""
        return abbreviate(self.blocks) + ("" if self.d_ffn is None else f"-ffn{self.d_ffn}")


def training_folder(run: Path, contender: Contender, seed: int) -> Path:
    return run / "runs" / f"{contender.key}-{seed}"


def search_folder(run: Path, seed: int) -> Path:
    return run / f"search-{seed}"


def pattern_file(run: Path, name: str) -> Path:
    return run / "patterns" / f"{name}.yaml"


def settings_file(run: Path) -> Path:
    """A copy of the COMPARISON.yaml that was given last."""
    return run / "comparison.yaml"


def not_found_file(run: Path) -> Path:
    """Names of random patterns that were sought and not found."""
    return run / "not-found.yaml"


def contenders_file(run: Path, mark: str) -> Path:
    return run / f"contenders{mark}.yaml"


@dataclass(frozen=True)
class Settings:
    """What COMPARISON.yaml holds; its meaning stands in nas/compare.py, as --help shows it."""

    retrain: Path
    search: Path | None = None
    search_seeds: list[int] = field(default_factory=lambda: [1])
    pareto: list[float] = field(default_factory=list)
    method: str = "budget"
    trials: int = 0
    patterns: list[str] = field(default_factory=lambda: ["interleaved"])
    random: int = 0
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])

    @property
    def derived_names(self) -> dict[str, str]:
        """{name: kind} of the contenders that a search leads to, in order."""
        names = {SEARCHED: SEARCHED} if self.search else {}
        names |= dict.fromkeys(self.budgets.values(), SEARCHED)
        names |= {PARAMETERS: PARAMETERS} if PARAMETERS in self.patterns else {}
        return names | {f"{RANDOM}-{number}": RANDOM for number in range(1, self.random + 1)}

    @property
    def budgets(self) -> dict[float, str]:
        """The name of the searched pattern of each budget of `pareto`: as derive.py names its file."""
        return {budget: f"{SEARCHED}-{budget:g}" for budget in sorted(self.pareto)}


def read_settings(path: Path, instead: dict) -> Settings:
    """Read and check a comparison; `instead`: what the command line says instead, by key. Raises InputError that names
    what is wrong."""
    content = read_user_yaml(path, "the comparison")
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InputError(f"{path} is no comparison: it needs `format: {FORMAT}` and `retrain: FILE.yaml`")
    known = [item.name for item in fields(Settings)]
    for key in content:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0)[0]
            raise InputError(f"{path}: unknown key {key!r}; the nearest is {nearest!r}")
    for key in ("retrain", "search"):
        if not isinstance(content.get(key, None if key == "retrain" else ""), str):
            raise InputError(f"{path}: {key} must name a configuration file, not {content.get(key)!r}")
    settings = Settings(**content | instead)
    check_list(path, "seeds", settings.seeds, is_count, "different whole numbers from 0, such as [1, 2, 3]")
    check_list(path, "search_seeds", settings.search_seeds, is_count, "different whole numbers from 0, such as [1, 2]")
    words = "different ratios to the interleaved pattern's cost, of at most 4 decimals, such as [0.5, 0.65]"
    check_list(path, "pareto", settings.pareto, is_budget, words, empty=True)
    if settings.method not in METHODS:
        raise InputError(f"{path}: method={settings.method!r} must be one of {', '.join(METHODS)}")
    if not is_count(settings.trials) or (settings.trials and settings.method != "evolution"):
        raise InputError(f"{path}: trials={settings.trials!r} must be a whole number from 0, with method: evolution")
    words = f"different names of {', '.join(PATTERN_NAMES)}, or pattern files"
    check_list(path, "patterns", settings.patterns, is_name, words, empty=True)
    if not is_count(settings.random):
        raise InputError(f"{path}: random={settings.random!r} must be a whole number from 0")
    if settings.search is None and (settings.derived_names or "search_seeds" in content):
        wrong = ", ".join(settings.derived_names) or "search_seeds"
        raise InputError(f"{path}: {wrong} cannot be had without a search: give `search: FILE.yaml`, or leave it out")
    if settings.search is None and not settings.patterns:
        raise InputError(f"{path}: patterns=[] leaves nothing to compare without a search")
    return replace(settings, **{key: path.parent / content[key] for key in ("retrain", "search") if key in content})


def is_count(value) -> bool:
    return type(value) is int and value >= 0


def is_budget(value) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf and round(value, 4) == value


def is_name(value) -> bool:
    return isinstance(value, str) and value != ""


def check_list(path: Path, key: str, values, is_right, words: str, empty: bool = False) -> None:
    right = isinstance(values, list) and all(map(is_right, values)) and len(set(values)) == len(values)
    if not right or not (values or empty):
        raise InputError(f"{path}: {key}={values!r} must be {words}")


def given_contenders(settings: Settings, path: Path, blocks: int) -> list[Contender]:
    """Those that do not wait for a search: by rules, for so many blocks, and from files. Raises InputError where one is
    unknown or of another length, or two have one name."""
    found = []
    for name in settings.patterns:
        if name in RULES:
            found.append(Contender(name, GIVEN, RULES[name](blocks)))
        elif name != PARAMETERS:
            found.append(contender_from_file(path, name, blocks))
    names = [*(contender.name for contender in found), *settings.derived_names]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{path}: two patterns are called {name!r}, by which they are told apart; rename a file")
    return found


def contender_from_file(path: Path, name: str, blocks: int) -> Contender:
    file = path.parent / name
    if not file.exists() and file.suffix not in (".yaml", ".yml"):
        nearest = difflib.get_close_matches(name, PATTERN_NAMES, n=1, cutoff=0)[0]
        known = ", ".join(PATTERN_NAMES)
        raise InputError(f"{path}: patterns: {name!r} is neither a file nor one of {known}; the nearest is {nearest!r}")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", file.stem):
        raise InputError(f"{path}: patterns: {name!r}: call the file by letters, digits, `-`, `_` and `.` alone")
    pattern = read_pattern(file)["blocks"]
    if len(pattern) != blocks:
        raise InputError(
            f"{path}: patterns: {file} has {len(pattern)} blocks, not model.blocks={blocks}, of which the interleaved "
            "pattern is made that it is held against"
        )
    return Contender(file.stem, GIVEN, pattern)
