"""Every option, with its meaning, unit, default and range. The one place where options stand; imports no torch.

defaults < YAML file < section.key=value, all checked strictly: an error names the key, what was given and what is
allowed, before anything is written.
"""

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from nas.core.config import Config, default_of, options
from nas.core.config_checks import check, settle_sparse
from nas.core.errors import InputError

RUN_KEYS = ("stage", "pattern", "search_seeds")  # what a run's config.yaml holds beside its options


# What runs from before an option existed used, where that is not its default.
BUILT_IN_BEFORE = {"train.beta2": 0.99, "search.fair_warmup": False, "search.latency.timing": "training"}


TYPE_WORDS = {
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


def document() -> str:
    """A line per option: key, default, meaning, what is allowed."""
    lines = []
    for key, item in options():
        shown = json.dumps(default_of(item)).replace('"', "")
        choices = item.metadata.get("choices")
        allowed = f"  [{' | '.join(choices)}]" if choices else ""
        lines.append(f"  {f'{key}={shown}':<34} {item.metadata['meaning']}{allowed}")
    return "\n".join(lines)


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """defaults < the YAML file < section.key=value overrides, checked. Raises InputError."""
    from omegaconf import OmegaConf

    config = OmegaConf.structured(Config)
    for origin, given in read_layers(path, overrides):
        for key, value in given.items():
            set_option(config, key, value, origin)
        # The later of the two ways to give the length wins, so that train.steps=10 shortens a run given in epochs.
        steps, epochs = given.get("train.steps"), given.get("train.epochs")
        if epochs is not None and steps is None:
            config.train.steps = None
        elif steps is not None and epochs is None:
            config.train.epochs = None
    result = OmegaConf.to_object(config)
    settle_sparse(result)
    check(result)
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command that trains takes: a configuration, overrides, a run folder."""
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--run", required=True, metavar="RUN_DIR", help="folder for this run")
    parser.add_argument("--resume", action="store_true", help="go on from the run's checkpoint, if it has one")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "options and their defaults (in CONFIG.yaml as sections, or as section.key=value):\n" + document()


def read_layers(path: str | Path, overrides: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """(what an error begins with, {dotted key: value}) of the file, then of each override."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.load(path)
    except OSError as error:
        reason = error.strerror or "it must hold sections with keys, such as `train: {steps: 100}`"
        raise InputError(f"cannot read the configuration {path}: {reason}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {first_line(error)}") from None
    if not OmegaConf.is_dict(content):
        raise InputError(f"{path} must hold sections with keys, such as `train: {{steps: 100}}`")
    content = OmegaConf.to_container(content)
    of_a_run = RUN_KEYS[0] in content
    content = flatten({key: value for key, value in content.items() if key not in RUN_KEYS}, f"{path}: ")
    layers = [(f"{path}: ", BUILT_IN_BEFORE | content if of_a_run else content)]
    for text in overrides:
        key, separator, _ = text.partition("=")
        if not separator or not key:
            raise InputError(f"{text!r} is not of the form section.key=value")
        check_known(key)
        try:
            layers.append(("", flatten(OmegaConf.to_container(OmegaConf.from_dotlist([text])), "")))
        except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
            raise InputError(f"{text!r}: {first_line(error)}") from None
    return layers


def set_option(config, key: str, value: Any, origin: str) -> None:
    """Put a value into an OmegaConf configuration; its dataclasses check the type."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    kind = {known: item.type for known, item in options()}[key]
    if "${" in str(value) or value == "???":
        raise InputError(f"{origin}{key}={value!r}: interpolation (${{...}} and ???) is not supported; give the value")
    try:
        if kind is bool and not isinstance(value, bool):  # OmegaConf would take 3 for true
            raise OmegaConfBaseException
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException:
        raise InputError(f"{origin}{key}={value!r} must be {TYPE_WORDS[kind]}") from None


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def flatten(mapping: dict, origin: str, prefix: str = "") -> dict[str, Any]:
    """{section: {key: value}} -> {"section.key": value}; raises InputError on an unknown key."""
    sections = {key.rpartition(".")[0] for key, _ in options()} - {""}
    flat = {}
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if key in sections:
            if value is None:  # a section whose keys are all commented out
                continue
            if not isinstance(value, dict):
                raise InputError(f"{origin}{key} is a section; give its keys, such as {example_of(key)}")
            flat.update(flatten(value, origin, f"{key}."))
        else:
            check_known(key, origin)
            if isinstance(value, dict):
                raise InputError(f"{origin}{key} takes a value, not a mapping")
            flat[key] = value
    return flat


def example_of(section: str) -> str:
    return next(key for key, _ in options() if key.startswith(f"{section}."))


def check_known(key: str, origin: str = "") -> None:
    known = [name for name, _ in options()]
    if key in known:
        return
    below = [name for name in known if name.startswith(f"{key}.")]
    if below:
        raise InputError(f"{origin}{key} is a section; give one of its keys, such as {below[0]}")
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    nearest = same_name[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0)
    raise InputError(f"{origin}unknown key {key!r}; the nearest is {nearest[0]!r} (--help lists all)")
