"""Reading and checking a configuration: section.key=value overrides the YAML file, which overrides the defaults."""

import argparse
import json
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from models.operations.registry import OPERATIONS
from nas.core.config import LEARNING_RATES, Config, default_of, flat_config, options
from nas.core.config_checks import check
from nas.core.errors import InputError, nearest
from nas.core.files import yaml_mistake

# Keys of a recorded configuration that are not options
RUN_KEYS = ("format", "stage", "pattern", "search_seeds", "weights_sha256", "minutes")
SECTIONS = "sections hold keys with values, such as `train: {steps: 100}`"
OTHER_NAMES = {
    "learning_rate": "train.lr",
    "hidden_size": "model.d_model",
    "num_layers": "model.blocks",
    "layers": "model.blocks",
}
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[Any]: "a list of operations, such as [attention, dense 8x]",
    list[int]: "a list of whole numbers, such as [32, 32, 3]",
}


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
    lines = []
    for key, item in options():
        default = json.dumps(default_of(item)).replace('"', "")
        choices = item.metadata.get("choices")
        allowed = f"  [{' | '.join(choices)}]" if choices else ""
        lines.append(f"  {f'{key}={default}':<34} {item.metadata['help']}{allowed}")
    lines.append("\noperations with their letters, sizes with their defaults, as in `dense 8x`, `window 32 heads=2`:")
    for name, kind in OPERATIONS.items():
        lines.append(f"  {f'{name} ({kind.letter})':<34} {kind.help}")
        lines += [
            f"    {f'{key} ({size.letter})' if size.letter else key:<32} {size.help}"
            for key, size in kind.sizes.items()
        ]
    return "\n".join(lines)


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """Read and check a configuration file with overrides such as "train.lr=0.1".

    Raises InputError if a key or value is not allowed.
    """
    config = OmegaConf.structured(Config)
    for origin, values in [(path, read_config_file(path)), *((text, read_override(text)) for text in overrides)]:
        if any(mark in str(values) for mark in ("${", "???")):
            raise InputError(f"{origin}: interpolation (${{...}} and ???) is not supported; give the value")
        try:
            config.merge_with(values)
        except (OmegaConfBaseException, TypeError) as error:
            raise InputError(f"{origin}: {mistake(error, values)}") from None
        given = flat_config(values)
        for key, item in options():
            if item.type is bool and type(given[key]) is not bool:  # OmegaConf takes 3 for true
                raise InputError(f"{origin}: {key} must be {TYPE_NAMES[bool]}")
        # The later of steps and epochs wins, so that train.steps=10 shortens a run whose file gives epochs.
        steps, epochs = (values.get("train", {}).get(name) for name in ("steps", "epochs"))
        if epochs is not None and steps is None:
            config.train.steps = None
        elif steps is not None and epochs is None:
            config.train.epochs = None
    result = OmegaConf.to_object(config)
    resolve_defaults(result)
    check(result)
    return result


def resolve_defaults(config: Config) -> None:
    """Replace null by the value that it stands for, so that config.yaml records values."""
    if config.train.lr is None:
        config.train.lr = LEARNING_RATES.get(config.train.optimizer)  # check() reports unknown ones
    if config.data.tokenizer == "bytes":  # there are always 256
        config.data.vocab_size = None


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The options in a YAML file, by section. Raises InputError if it is not a configuration."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:  # OmegaConf raises one without strerror if the file holds a single value
        raise InputError(f"cannot read the configuration {path}: {error.strerror or SECTIONS}") from None
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        problem = yaml_mistake(error, Path(path).read_text(errors="replace"))
        raise InputError(f"{path} is not YAML: {problem}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is no configuration: {SECTIONS}")
    content = {key: value for key, value in content.items() if key not in RUN_KEYS}
    check_keys(content, path)
    sections = {key.partition(".")[0] for key, _ in options()}  # one is None if all its keys are commented out
    return {key: value for key, value in content.items() if value is not None or key not in sections}


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
    """{section: {key: value}} of one section.key=value. Raises InputError if it has another form."""
    if not text.partition("=")[1] or text.startswith("="):
        raise InputError(f"{text!r} is not of the form section.key=value")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([text]))
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise InputError(f"{text!r} is not of the form section.key=value: {yaml_mistake(error, text)}") from None


def mistake(error: Exception, values: dict) -> str:
    """What an error of OmegaConf says about a key or a value, and what would be right. values: the refused ones."""
    key, known = str(getattr(error, "full_key", None)).partition("[")[0], dict(options())
    if isinstance(error, ConfigKeyError):
        same_name = [name for name in known if name.endswith(f".{error.key}") or name == OTHER_NAMES.get(error.key)]
        whole, value = key, reduce(lambda part, name: part[name], key.split("."), values)
        while isinstance(value, dict) and value:  # the first option below an unknown section
            name, value = next(iter(value.items()))
            whole += f".{name}"
        found = (same_name or [nearest(whole, known)])[0]
        return f"unknown key {key!r}; the nearest is {found!r} (--help lists all)"
    if key not in known:
        return SECTIONS
    kind = known[key].type
    return f"{key} must be {TYPE_NAMES.get(kind) or TYPE_NAMES[get_args(kind)[0]] + ' or null'}"
