"""nas.core.pi_history."""

from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import read_lines


def read_pi(run: Path) -> list[dict]:
    """The lines of pi.jsonl. Raises InputError where the folder is no search run."""
    if not run.is_dir():
        raise InputError(f"{run} is no run folder: give the --run folder of a search")
    lines = read_lines(run / "pi.jsonl") if (run / "pi.jsonl").is_file() else []
    if not lines:
        raise InputError(
            f"{run} holds no pi.jsonl with a logged step: give the --run folder of a search, not of a retrain"
        )
    for number, line in enumerate(lines, start=1):
        if (
            not is_pi_line(line)
            or line["operations"] != lines[0]["operations"]
            or len(line["pi"]) != len(lines[0]["pi"])
        ):
            raise InputError(
                f"{run / 'pi.jsonl'} is damaged: line {number} lacks step, temperature, operations or a fitting pi"
            )
    return lines


def is_pi_line(line) -> bool:
    if not isinstance(line, dict) or not {"step", "temperature", "operations", "pi"} <= line.keys():
        return False
    rows, names = line["pi"], line["operations"]
    if not (isinstance(rows, list) and isinstance(names, list) and rows and names):
        return False
    return all(isinstance(row, list) and len(row) == len(names) for row in rows)
