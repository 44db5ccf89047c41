"""The specification of a comparison: COMPARISON.yaml, and its contenders."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from nas.core.config import Config, Natural, is_set
from nas.core.config_loading import load_config, simplify
from nas.core.errors import InputError, nearest
from nas.core.files import read_user_yaml
from nas.core.option_types import Rule, above, below, describe, fits
from nas.core.pattern import FORMAT as PATTERN_FORMAT
from nas.core.pattern import file_name, read_pattern, shape_options
from nas.core.run_folder import PATTERN
from nas.costs.baselines import RULES

FORMAT = "par-comparison/2"
NAMES = f"different names of {', '.join(RULES)}, or pattern files"
Names = Annotated[list[str], Rule(NAMES, lambda names: is_set(names) and "" not in names)]
Seeds = Annotated[list[Natural], Rule("different whole numbers from 0, such as [1, 2, 3]", is_set)]
Some = Rule("{}, at least one", len)
SETTINGS = "comparison.yaml"  # in the run folder: the settings of the last call, and {name: key} of its contenders


@dataclass(frozen=True)
class Contender:
    name: str
    content: dict  # of its pattern file
    config: Config  # of its training
    key: str  # the name of its runs; contenders that are the same network share them
    seeds: list[int]  # of its trainings

    @property
    def blocks(self) -> list[str]:
        return self.content["blocks"]


@dataclass(frozen=True)
class Settings:
    """The content of COMPARISON.yaml. `python -m nas.compare --help` explains each key."""

    retrain: Annotated[str, Rule("the name of a configuration file", bool)]
    patterns: Annotated[Names, Some]
    seeds: Annotated[Seeds, Some] = field(default_factory=lambda: [1, 2, 3])
    once: Names = field(default_factory=list)
    margin: Annotated[float, above(0), below(1)] = 0.01


def read_settings(path: Path, overrides: dict) -> Settings:
    """Read and check COMPARISON.yaml. Raises InputError. overrides: values from the command line, by key."""
    content = read_user_yaml(path, "the comparison")
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InputError(f"{path} is no comparison: it needs `format: {FORMAT}`, `retrain: FILE.yaml` and `patterns`")
    kinds = {option.name: option.type for option in fields(Settings)}
    content = {"retrain": None, "patterns": None} | content | overrides
    for key, value in content.items():
        if key not in kinds:
            raise InputError(f"{path}: unknown key {key!r}; the nearest is {nearest(key, kinds)!r}")
        if not fits(value, kinds[key]):
            raise InputError(f"{path}: {key}={value!r} must be {describe(kinds[key])}")
    return Settings(**content | {"retrain": str(path.parent / content["retrain"])})


def read_contenders(settings: Settings, path: Path, overrides: list[str]) -> list[Contender]:
    """The contenders in order. Rules have the blocks of the recipe, and pattern files their own sizes.

    Raises InputError if a name is unknown or used twice, or if a pattern does not fit the recipe.
    """
    contenders, recipe = [], load_config(settings.retrain, [*overrides, "seed=1"])
    for given in [*settings.patterns, *settings.once]:
        new = read_contender(given, path, settings, recipe, overrides)
        if new.name in [one.name for one in contenders]:
            raise InputError(f"{path}: two patterns are called {new.name!r}; names must differ: rename a file")
        contenders.append(new)
    return contenders


def read_contender(name: str, path: Path, settings: Settings, recipe: Config, overrides: list[str]) -> Contender:
    """The contender of a rule, or of a pattern file relative to COMPARISON.yaml at `path`."""
    file, given_name = path.parent / name, name
    if name in RULES:
        content = {"format": PATTERN_FORMAT, "blocks": RULES[name](recipe.model.blocks)}
    elif not file.exists() and file.suffix not in (".yaml", ".yml"):
        known = f"neither a file nor one of {', '.join(RULES)}; the nearest is {nearest(name, RULES)!r}"
        raise InputError(f"{path}: {name!r} is {known}")
    elif not re.fullmatch(r"[^\W_][\w.-]*", file.stem):
        allowed = "begin with a letter or digit and consist of letters, digits, `-`, `_` and `.`"
        raise InputError(f"{path}: {name!r}: the file name must {allowed}")
    else:
        content, name = read_pattern(file), file.stem
    own, given = shape_options(content), [*overrides, "seed=1"]
    config = load_config(settings.retrain, [*own, *given])
    if config != load_config(settings.retrain, [*given, *own]):
        other = f"{file} has {', '.join(own)}, and an option of the command line has another value"
        raise InputError(f"{other}; leave it out, or write it into {settings.retrain}, which patterns may replace")
    blocks = simplify(content["blocks"], config, f"{name}: block")  # as in retrain.py
    sizes = [str(size) for size in (config.data.vocab_size, config.model.d_model) if size is not None]
    usual = config.model.d_model * recipe.model.heads // recipe.model.d_model
    sizes += [f"h{config.model.heads}"] * (config.model.heads != usual)
    key = "-".join([*sizes, file_name(blocks)])
    name = key if name == Path(PATTERN).stem else name  # derive.py calls all its files so
    once = given_name in settings.once or not blocks  # without a network all seeds are equal
    return Contender(name, content | {"blocks": blocks}, config, key, settings.seeds[:1] if once else settings.seeds)
