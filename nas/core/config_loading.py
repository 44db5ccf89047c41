"""Reading and checking a configuration: section.key=value overrides the YAML file, which overrides the defaults."""

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from models.operations.registry import OPERATIONS
from nas.core.config import LEARNING_RATES, Config, config_of, flat_config, flatten, options
from nas.core.config_checks import check
from nas.core.errors import InputError, nearest
from nas.core.files import Loader, read_user_yaml
from nas.core.option_types import choices, describe, fits

# Keys of a recorded configuration that are not options
RUN_KEYS = ("format", "stage", "pattern", "search_seeds", "weights_sha256", "minutes")
SECTIONS = "sections hold keys with values, such as `train: {steps: 100}`"
OTHER_NAMES = {
    "learning_rate": "train.lr",
    "hidden_size": "model.d_model",
    "num_layers": "model.blocks",
    "layers": "model.blocks",
}
OTHER_VALUES = {"gpu": "cuda"}  # words of other libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of search.py and retrain.py: a configuration, overrides and a run folder."""
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--run", required=True, metavar="RUN_DIR", help="folder for the files of this run")
    parser.add_argument("--resume", action="store_true", help="continue from the run's checkpoint, if it has one")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"options and their defaults (in CONFIG.yaml by section, or section.key=value):\n{options_help()}"


def options_help() -> str:
    """A line per option, with its default, help text and choices, and a line per operation and size."""
    lines, defaults = [], flat_config({})
    for key, option in options().items():
        text = f"{option.method}: {option.help}" if option.method else option.help
        words = choices(option.kind)
        allowed = f"  [{' | '.join(words)}]" if len(words) > 1 else ""
        lines.append(f"  {f'{key}={shown(defaults[key])}':<34} {text}{allowed}")
    lines.append("\noperations with their letters, sizes with their defaults, as in `dense 8x`, `window 32 heads=2`:")
    for name, kind in OPERATIONS.items():
        lines.append(f"  {f'{name} ({kind.letter})':<34} {kind.help}")
        lines += [
            f"    {f'{key} ({size.letter})' if size.letter else key:<32} {size.help}"
            for key, size in kind.sizes.items()
        ]
    return "\n".join(lines)


def shown(value) -> str:
    """A value as users write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False).replace('"', "")


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """Read and check a configuration file with overrides such as "train.lr=0.1".

    Raises InputError if a key or value is not allowed.
    """
    values, origins = flat_config({}), {}
    for where, given in [(f"{path}: ", read_config_file(path)), *(("", read_override(text)) for text in overrides)]:
        for key in given:
            check_key(key, given[key], where)
        values |= given
        origins |= dict.fromkeys(given, where)
        # The later of steps and epochs wins, so that train.steps=10 shortens a run whose file gives epochs.
        steps, epochs = (given.get(key) is not None for key in ("train.steps", "train.epochs"))
        if steps != epochs:
            values["train.steps" if epochs else "train.epochs"] = None
    config = config_of({key: read_value(key, value, origins.get(key, "")) for key, value in values.items()})
    resolve_defaults(config)
    check(config)
    return config


def resolve_defaults(config: Config) -> None:
    """Replace null by the value that it stands for, so that config.yaml records values."""
    if config.train.lr is None:
        config.train.lr = LEARNING_RATES[config.train.optimizer]
    if config.data.tokenizer == "bytes":  # there are always 256
        config.data.vocab_size = None


def read_config_file(path: str | Path) -> dict[str, Any]:
    """{dotted key: value} of a YAML file. Raises InputError if it is not a configuration."""
    content = read_user_yaml(Path(path), "the configuration")
    if not isinstance(content, dict | None):
        raise InputError(f"{path} is no configuration: {SECTIONS}")
    content = {key: value for key, value in (content or {}).items() if key not in RUN_KEYS}
    check_keys(content, path)
    sections = {key.partition(".")[0] for key in options()}  # one is None if all its keys are commented out
    return flatten({key: value for key, value in content.items() if value is not None or key not in sections})


def check_keys(content: dict, path: str | Path) -> None:
    """Raises InputError if a key of a file, or of a section, is no text, or holds a colon or a dot."""
    for key, value in content.items():
        if not isinstance(key, str):
            comma = "; write numbers without a comma, such as 2000 or 0.8" if type(key) is int else ""
            raise InputError(f"{path}: {key!r} is no name of an option{comma}")
        if ":" in key:
            raise InputError(f"{path}: {key!r} is one word: write a space after the colon")
        if "." in key:
            quotes = "; put quotes around a text that holds a comma" if value is None else ""
            nested = ": {".join(key.split(".")) + ": VALUE" + "}" * key.count(".")
            raise InputError(f"{path}: {key!r}: dots are for the command line; here write {nested}{quotes}")
        if isinstance(value, dict):
            check_keys(value, path)


def read_override(text: str) -> dict[str, Any]:
    """{key: value} of one section.key=value. Text stays as it is, and any other value is YAML."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InputError(f"{text!r} is not of the form section.key=value")
    kind = options()[key].kind if key in options() else str
    if not fits(value, kind) or (value == "null" and fits(None, kind)):
        with suppress(yaml.YAMLError, ValueError):
            return {key: yaml.load(value, Loader)}
    return {key: value}


def read_value(key: str, value, where: str):
    """The value of an option. Raises InputError, which begins with `where`, if it is not allowed."""
    kind, words, advice = options()[key].kind, choices(options()[key].kind), ""
    if fits(value, kind):
        return value
    if type(value) in (int, str):
        with suppress(ValueError, OverflowError):
            if fits(number := float(value), kind):  # YAML takes 3e-3 for text
                return number
    if isinstance(value, str):
        advice = f"; the nearest is {nearest(OTHER_VALUES.get(value, value), words)}" if len(words) > 1 else ""
    elif fits(shown(value), kind):
        advice = "; put quotes around it"
    raise InputError(f"{where}{key}={shown(value)} must be {describe(kind)}{advice}")


def check_key(key: str, value, where: str) -> None:
    """Raises InputError that names the nearest option if there is none with this key."""
    known, name = options(), key.rpartition(".")[2]
    if key in known:
        return
    if any(other.startswith(f"{key}.") for other in known):
        raise InputError(f"{where}{key}={shown(value)}: {SECTIONS}")
    same_name = [other for other in known if other.endswith(f".{name}") or other == OTHER_NAMES.get(name)]
    found = (same_name or [nearest(key, known)])[0]
    raise InputError(f"{where}unknown key {key!r}; the nearest is {found!r} (--help lists all)")
