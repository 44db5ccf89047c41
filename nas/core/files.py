"""nas.core.files."""

import json
import math
from pathlib import Path

import yaml

from nas.core.errors import InputError


def perplexity(nll: float) -> float:
    """exp(nll per token); the largest float rather than an overflow."""
    return math.exp(min(nll, 709.0))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_yaml(path: Path, content: dict) -> None:
    write_text(path, yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120))


def read_yaml(path: Path) -> dict:
    """Raises InputError where the file is missing or no mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError):
        raise InputError(f"{path} is damaged: not YAML") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged: not a mapping")
    return content


def read_lines(path: Path) -> list[dict]:
    """The lines of a JSON lines file; a last one that a kill cut short is left out.

    Raises InputError where another line is damaged.
    """
    texts, lines = path.read_text(encoding="utf-8", errors="replace").splitlines(), []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number < len(texts):
                raise InputError(f"{path} is damaged: line {number} is not JSON") from None
    return lines


def read_hand_written(path: Path, what: str):
    """The content of a YAML file that a person may have written. Raises InputError with the place of a mistake."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {what} {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None


def write_atomically(path: Path, blocks) -> None:
    """Write bytes to a temporary file beside `path`, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        for block in blocks:
            file.write(block)
    part.replace(path)
