"""What is compared: the contenders, as COMPARISON.yaml and the command line name them. Imports no torch."""

import difflib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from nas.baselines import RULES
from nas.errors import InputError
from nas.pattern import abbreviate, read_pattern
from nas.record import read_yaml

FORMAT = "par-comparison/1"
PARAMETERS, SEARCHED, RANDOM = "parameters", "searched", "random"
PATTERN_NAMES = (*RULES, PARAMETERS)


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


@dataclass(frozen=True)
class Settings:
    """What COMPARISON.yaml holds; its meaning stands in nas/compare.py, as --help shows it."""

    retrain: Path
    search: Path | None = None
    search_seeds: list[int] = field(default_factory=lambda: [1])
    pareto: list[float] = field(default_factory=list)
    patterns: list[str] = field(default_factory=lambda: ["interleaved"])
    random: int = 0
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])

    @property
    def derived_names(self) -> dict[str, str]:
        """{name: kind} of the contenders that a search leads to, in order."""
        names = {SEARCHED: SEARCHED} if self.search else {}
        names |= {f"{SEARCHED}-{budget:g}": SEARCHED for budget in self.pareto}
        names |= {PARAMETERS: PARAMETERS} if PARAMETERS in self.patterns else {}
        return names | {f"{RANDOM}-{number}": RANDOM for number in range(1, self.random + 1)}


def read_settings(path: Path, instead: dict) -> Settings:
    """Read and check a comparison; `instead`: what the command line says instead, by key. Raises InputError that names
    what is wrong."""
    content = read_yaml(path)
    if content.pop("format", None) != FORMAT:
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
    check_list(path, "seeds", settings.seeds, int, "different whole numbers from 0, such as [1, 2, 3]")
    check_list(path, "search_seeds", settings.search_seeds, int, "different whole numbers from 0, such as [1, 2]")
    check_list(path, "pareto", settings.pareto, (int, float), "different ratios, such as [0.5, 0.65]", empty=True)
    words = f"different names of {', '.join(PATTERN_NAMES)}, or pattern files"
    check_list(path, "patterns", settings.patterns, str, words, empty=True)
    if type(settings.random) is not int or settings.random < 0:
        raise InputError(f"{path}: random={settings.random!r} must be a whole number from 0")
    if settings.search is None and settings.derived_names:
        raise InputError(
            f"{path}: {', '.join(settings.derived_names)} cannot be found without a search: give `search: FILE.yaml`, "
            "or leave out pareto, random and parameters"
        )
    return replace(settings, **{key: path.parent / content[key] for key in ("retrain", "search") if key in content})


def check_list(path: Path, key: str, values, kind, words: str, empty: bool = False) -> None:
    right = isinstance(values, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
    if right and kind is not str:
        right = all(value >= 0 for value in values)
    if not right or len(set(values)) < len(values) or not (values or empty):
        raise InputError(f"{path}: {key}={values!r} must be {words}")


def given_contenders(settings: Settings, path: Path, blocks: int) -> list[Contender]:
    """Those that do not wait for a search: by rules, for so many blocks, and from files. Raises InputError where one is
    unknown, or two have one name."""
    found = []
    for name in settings.patterns:
        if name in RULES:
            found.append(Contender(name, "given", RULES[name](blocks)))
        elif name != PARAMETERS:
            file = path.parent / name
            if not file.exists() and file.suffix not in (".yaml", ".yml"):
                nearest = difflib.get_close_matches(name, PATTERN_NAMES, n=1, cutoff=0)[0]
                raise InputError(
                    f"{path}: patterns: {name!r} is neither a file nor one of {', '.join(PATTERN_NAMES)}; the nearest "
                    f"is {nearest!r}"
                )
            found.append(Contender(file.stem, "given", read_pattern(file)["blocks"]))
    names = [*(contender.name for contender in found), *settings.derived_names]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{path}: two patterns are called {name!r}, by which they are told apart; rename a file")
    return found
