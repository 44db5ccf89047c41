"""Reading and checking a configuration: section.key=value overrides the YAML file, which overrides the defaults."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nas.core.config import OPTIMIZER_DEFAULTS, Config, default_of, flat_config, options
from nas.core.config_checks import check
from nas.core.errors import InputError, nearest
from nas.core.files import yaml_message

# Keys of a recorded configuration that are not options
RUN_KEYS = ("format", "stage", "pattern", "search_seeds", "weights_sha256")
SECTIONS_NEEDED = "must hold sections with keys, such as `train: {steps: 100}`"
OTHER_NAMES = {
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "hidden_size": "model.d_model",
    "num_heads": "model.heads",
    "n_heads": "model.heads",
    "num_layers": "model.blocks",
    "n_layers": "model.blocks",
    "layers": "model.blocks",
}  # names of options in other programs
TYPE_NAMES = {
    int: "a whole number",
    int | None: "a whole number or null",
    float: "a number",
    float | None: "a number or null",
    bool: "true or false",
    str: "text",
    Any: "a list of whole numbers, or auto",
    list[str]: "a list of names, such as [attention, dense]",
    list[int]: "a list of whole numbers, such as [32, 32, 3]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of search.py and retrain.py: a configuration, overrides and a run folder."""
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--run", required=True, metavar="RUN_DIR", help="folder for the files of this run")
    parser.add_argument("--resume", action="store_true", help="continue from the run's checkpoint, if it has one")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "options and their defaults (in CONFIG.yaml as sections, or as section.key=value):\n" + options_help()
    )


def options_help() -> str:
    """A line per option: key, default, help text, choices."""
    lines = []
    for key, item in options():
        default = json.dumps(default_of(item)).replace('"', "")
        choices = item.metadata.get("choices")
        allowed = f"  [{' | '.join(choices)}]" if choices else ""
        lines.append(f"  {f'{key}={default}':<34} {item.metadata['help']}{allowed}")
    return "\n".join(lines)


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """Read and check a configuration file with overrides such as "train.lr=0.1".

    Raises InputError if a key or value is not allowed.
    """
    config = OmegaConf.structured(Config)
    layers = [(f"{path}: ", read_config_file(path)), *(("", read_override(text)) for text in overrides)]
    for origin, values in layers:
        for key, value in values.items():
            set_option(config, key, value, origin)
        # The later of steps and epochs wins, so that train.steps=10 shortens a run whose file gives epochs.
        steps, epochs = values.get("train.steps"), values.get("train.epochs")
        if epochs is not None and steps is None:
            config.train.steps = None
        elif steps is not None and epochs is None:
            config.train.epochs = None
    result = OmegaConf.to_object(config)
    resolve_defaults(result)
    check(result)
    return result


def read_config_file(path: str | Path) -> dict[str, Any]:
    """{dotted key: value} of a YAML file. Raises InputError if it is not a configuration."""
    try:
        content = OmegaConf.load(path)
    except OSError as error:  # OmegaConf raises one without strerror if the file holds a single value
        raise InputError(f"cannot read the configuration {path}: {error.strerror or 'it ' + SECTIONS_NEEDED}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(yaml_message(path, error)) from None
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {first_line(error)}") from None
    if not OmegaConf.is_dict(content):
        raise InputError(f"{path} {SECTIONS_NEEDED}")
    content = OmegaConf.to_container(content)
    return flatten({key: value for key, value in content.items() if key not in RUN_KEYS}, f"{path}: ")


def read_override(text: str) -> dict[str, Any]:
    """{dotted key: value} of one section.key=value. Raises InputError if it has another form."""
    key, separator, _ = text.partition("=")
    if not separator or not key:
        raise InputError(f"{text!r} is not of the form section.key=value")
    check_known(key)
    try:
        return flatten(OmegaConf.to_container(OmegaConf.from_dotlist([text])), "")
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise InputError(f"{text!r}: {first_line(error)}") from None


def set_option(config, key: str, value: Any, origin: str) -> None:
    """Set an option. Raises InputError, with the prefix `origin`, if the value has the wrong type."""
    kind = {known: item.type for known, item in options()}[key]
    if "${" in str(value) or value == "???":
        raise InputError(f"{origin}{key}={value!r}: interpolation (${{...}} and ???) is not supported; give the value")
    try:
        if kind is bool and not isinstance(value, bool):  # OmegaConf would accept 3 as true
            raise OmegaConfBaseException
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException:
        raise InputError(f"{origin}{key}={value!r} must be {TYPE_NAMES[kind]}") from None


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def flatten(mapping: dict, origin: str, prefix: str = "") -> dict[str, Any]:
    """{section: {key: value}} -> {"section.key": value}. Raises InputError on an unknown key."""
    sections = {key.rpartition(".")[0] for key, _ in options()} - {""}
    flat = {}
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if key in sections and value is None:  # all keys of the section are commented out
            continue
        if key in sections and isinstance(value, dict):
            flat |= flatten(value, origin, f"{key}.")
            continue
        check_known(key, origin)
        if isinstance(value, dict):
            raise InputError(f"{origin}{key} takes a value, not a mapping")
        flat[key] = value
    return flat


def check_known(key: str, origin: str = "") -> None:
    """Raises InputError with the nearest key if `key` is not an option."""
    known = [name for name, _ in options()]
    if key in known:
        return
    below = [name for name in known if name.startswith(f"{key}.")]
    if below:
        raise InputError(f"{origin}{key} is a section; give one of its keys, such as {below[0]}")
    last = key.rpartition(".")[2]
    same_name = [name for name in known if name.rpartition(".")[2] == last or name == OTHER_NAMES.get(last)]
    raise InputError(
        f"{origin}unknown key {key!r}; the nearest is {(same_name or [nearest(key, known)])[0]!r} (--help lists all)"
    )


def default_stride(keys: int) -> int:
    """The power of two nearest to sqrt(keys)."""
    root = math.sqrt(keys)
    lower = 2 ** math.floor(math.log2(root))
    return lower if root - lower <= 2 * lower - root else 2 * lower


def derived_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """{dotted key: value} that null stands for in options whose default depends on others.

    values: {dotted key: value} of every option.
    """
    found, keys = {}, values["train.segment"] + values["train.memory"]
    if keys > 0:  # check() reports lengths that are out of range
        found["model.stride"] = default_stride(keys)
        found["model.window"] = max(1, keys // 4)
    for key, value in OPTIMIZER_DEFAULTS.get(values["train.optimizer"], {}).items():  # check() reports unknown ones
        found[f"train.{key}"] = value
    return found


def resolve_defaults(config: Config) -> None:
    """Replace null by the value of derived_defaults(), so that config.yaml records values."""
    values = flat_config(asdict(config))
    for key, value in derived_defaults(values).items():
        if values[key] is None:
            section, name = key.split(".")
            setattr(getattr(config, section), name, value)
