"""Reading and checking a configuration: section.key=value overrides the YAML file, which overrides the defaults."""

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from models.operations.registry import OPERATIONS
from nas.core.config import CANDIDATES, PIECES, Config, changes, config_of, flat_config, flatten, milliseconds, options
from nas.core.errors import InputError, nearest
from nas.core.files import Loader, read_user_yaml, read_yaml, write_yaml
from nas.core.option_types import choices, describe, fits
from nas.core.pattern import parse_block, resolve_block, simplify_block
from nas.core.run_folder import CONFIG, LOCK, NO_NETWORK, PLAN, SEARCH, TRIALS, lock_folder, try_writing

# Keys of a recorded configuration that are not options
RUN_KEYS = ("format", "stage", "pattern", "search_seeds", "weights_sha256", "minutes")
SECTIONS = "sections hold keys with values, such as `train: {steps: 100}`"
OTHER_NAMES = {"learning_rate": "train.lr", "hidden_size": "model.d_model"}  # of other libraries
OTHER_NAMES |= {"num_layers": "model.blocks", "layers": "model.blocks"}
OTHER_VALUES = {"gpu": "cuda"}
MOST_BUDGET = 10  # times the cost of the reference
REPORT = "report.html"
# --minutes sets them
PLANNED = "train.epochs", "train.steps", "train.warmup_steps", "train.evaluate_every"
PLANNED += "search.vocab_size", "search.d_model"


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
        for key, size in kind.sizes.items():
            lines.append(f"    {f'{key} ({size.letter})' if size.letter else key:<32} {size.help}")
    return "\n".join(lines)


def shown(value) -> str:
    """A value as users write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False).replace('"', "")


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """Read a configuration file with overrides such as "train.lr=0.1". Raises InputError if a value is not allowed."""
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
    config.resolve_defaults()
    check(config)
    return config


def read_config_file(path: str | Path) -> dict[str, Any]:
    """{dotted key: value} of a YAML file. Raises InputError if it is not a configuration."""
    content = read_user_yaml(Path(path), "the configuration")
    if not isinstance(content, dict | None):
        raise InputError(f"{path} is no configuration: {SECTIONS}")
    content = (content or {}).get("training", content or {})  # it is that of a folder for Transformers
    content = {key: value for key, value in content.items() if key not in RUN_KEYS}
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


def check(config: Config) -> None:
    """Spell the operations as usual; without any, add the method's. Raises InputError if options conflict."""
    for conflict in conflicts(config):
        raise InputError(conflict)
    names = config.search.operations or default_operations(config)
    config.search.operations, known = simplify(names, config, "search.operations: entry"), {}
    for given, name in zip(names, config.search.operations):
        if (block := str(resolve_block(name, config.shape))) in known:
            raise InputError(f"search.operations: {known[block]} and {given} are the same; candidates must differ")
        known[block] = given


def conflicts(config: Config) -> Iterator[str]:
    """What is wrong with options that do not fit each other, in sentences."""
    data, model, train, search, latency = config.data, config.model, config.train, config.search, config.search.latency
    if model.d_model % model.heads:
        divisors = ", ".join(str(n) for n in range(1, model.d_model + 1) if model.d_model % n == 0)
        yield f"model.heads={model.heads} must divide model.d_model={model.d_model}: one of {divisors}"
    if model.init == "depth_scaled" and model.norm != "pre":
        yield f"model.init=depth_scaled needs model.norm=pre, not {model.norm}"
    if model.tie_embeddings is True and model.div_value != 1:
        yield f"model.div_value={model.div_value} needs model.tie_embeddings=false"
    if model.grid and (data.tokenizer in (*PIECES, "words") or data.newline != "keep"):  # build.py checks a path
        yield f"model.grid={model.grid} counts bytes: it needs data.tokenizer=bytes and data.newline=keep"
    if train.steps is None and train.epochs is None:
        yield "train.steps and train.epochs are both null: give one of them"
    if train.steps is not None and train.epochs is not None:
        yield f"train.steps={train.steps} and train.epochs={train.epochs} are both given: set one to null"
    if train.batch_size % train.grad_accum_steps:
        yield f"train.grad_accum_steps={train.grad_accum_steps} must divide train.batch_size={train.batch_size}"
    if train.short_share and (conflict := config.short_segments_conflict):
        yield conflict
    values, defaults = flat_config(config), flat_config({})
    for key, option in options().items():
        if option.method not in (None, search.method) and values[key] != defaults[key]:
            yield f"{key}={values[key]} needs search.method={option.method}"
    if milliseconds(latency.target) and not latency.in_milliseconds:
        yield f"search.latency.target={latency.target} needs search.latency.source=measured"
    if latency.timing == "generation" and latency.source == "flops":
        yield "search.latency.timing=generation needs search.latency.source=measured"
    if latency.source == "onnx" and latency.timing != "generation":
        yield "search.latency.source=onnx needs search.latency.timing=generation"
    head = model.d_model // model.heads
    for width in search.d_model if search.d_model != "auto" else []:
        if width % head:
            yield f"search.d_model={width} must be a multiple of {head}, the channels of a head (model.heads)"
    if search.size.target and (config.mixture.size or 0) >= search.size.target:
        yield f"mixture.size={config.mixture.size} must be below search.size.target={search.size.target}"
    if search.vocab_size and data.tokenizer not in PIECES:
        yield "search.vocab_size needs data.tokenizer=bpe or unigram"
    if search.vocab_size and data.vocab_size is None:
        yield "search.vocab_size needs data.vocab_size, that of the reference"


def simplify(pattern: list, config: Config, where: str) -> list[str]:
    """The blocks in their usual spelling, without sizes that are defaults. Raises InputError if one does not fit."""
    model, simple = config.model, []
    for number, block in enumerate(pattern, start=1):
        simple.append(simplify_block(block, config.shape, f"{where} {number}: "))
        name, _ = parse_block(block)
        if model.grid and OPERATIONS[name].carries_state:  # which would go on from one image to the next
            raise InputError(f"{where} {number}: {name} cannot read images; remove it, or model.grid={model.grid}")
    return simple


def check_search(config: Config, minutes: float | None = None) -> None:
    """Raises InputError if a search has an unsuitable budget or different texts. minutes: nas.run sets train.epochs."""
    latency, budget = config.search.latency, f"search.latency.target={config.search.latency.target}"
    if latency.source != "none" and milliseconds(latency.target) is None and latency.target > MOST_BUDGET:
        raise InputError(f"{budget} is a ratio to the reference: give at most {MOST_BUDGET}")
    if latency.source == "none" and latency.target != Config().search.latency.target:
        raise InputError(f"{budget} needs search.latency.source=measured, or flops")
    if config.search.vocab_size and config.train.epochs is None and not minutes:
        needs = "train.epochs instead of train.steps, so that each vocabulary reads the same text"
        raise InputError(f"search.vocab_size needs {needs}; nas.run --minutes finds a suitable number")


def default_operations(config: Config) -> list[str]:
    """The candidates of the search method that differ and fit the sizes of the configuration."""
    found = {}
    for name in CANDIDATES[config.search.method]:
        with suppress(InputError):
            found.setdefault(str(resolve_block(name, config.shape)), name)
    return [*found.values()]


def open_plan(folder: Path, minutes: float | None, config: Config) -> Config | None:
    """Lock the folder of nas.run. Returns the plan of an earlier call, run.yaml; None before its first trial has begun.

    Raises InputError if that call had other minutes or another configuration, or if the folder holds other things.
    """
    file, trials = folder / PLAN, folder / SEARCH / TRIALS / CONFIG
    begun = file.exists() and trials.exists()
    if not begun:
        own = {SEARCH, LOCK, PLAN, NO_NETWORK, f"{NO_NETWORK}.yaml"}
        if folder.exists() and {entry.name for entry in folder.iterdir()} - own:
            if file.exists():
                raise InputError(f"{trials} is missing, so the search cannot go on; use another folder")
            raise InputError(f"--run {folder} is not empty, but holds no {PLAN} of this command; use another folder")
        try_writing(folder)
        folder.mkdir(parents=True, exist_ok=True)
    lock_folder(folder)
    if not begun:
        return None
    plan, planned = load_config(file, []), read_yaml(file)["minutes"]
    if minutes != planned:
        given = "without --minutes" if planned is None else f"with --minutes {planned:g}"
        raise InputError(f"--run {folder} was begun {given}: repeat the command so, or use another folder")
    may_differ = *(PLANNED if minutes else ()), *(key for key in options() if key.startswith("jobs."))
    if changed := ", ".join(changes(flat_config(plan), flat_config(config), may_differ)):
        raise InputError(f"--run {folder} has another configuration: {changed}; use another folder")
    plan.jobs = config.jobs
    write_yaml(file, {"minutes": minutes, **asdict(plan)})
    return plan
