"""A folder of JSON results. Each result is computed once."""

import json
import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import write_text

SETTINGS = "settings.json"


def job_parser(description: str, out: str, example: str) -> ArgumentParser:
    """A parser of the overrides, of --out, which is `out` by default, and of --only, with an example."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as data.source=FOLDER")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the results")
    only = f"jobs to do: names with wildcards, separated by commas, such as '{example}'"
    parser.add_argument("--only", default="*", help=only)
    return parser


class Jobs:
    """A folder of named results that were computed with the same settings.

    Several processes may share it. `only` selects the names that this process computes: patterns with wildcards,
    separated by commas.
    """

    def __init__(self, folder: Path, settings: list[str], only: str = "*"):
        """Raises InputError if the folder holds results of other settings."""
        self.folder, self.only = folder, only.split(",")
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / SETTINGS
        own = folder / f".{os.getpid()}"
        own.write_text(json.dumps(sorted(settings)))
        with suppress(FileExistsError):
            os.link(own, kept)  # of several processes that start together, one succeeds
        own.unlink()
        before = json.loads(kept.read_text())
        if before != sorted(settings):
            raise InputError(
                f"{folder} holds results with {' '.join(before) or 'no overrides'}, not with "
                f"{' '.join(sorted(settings)) or 'none'}; give another folder with --out, or the same overrides"
            )

    def get(self, name: str) -> dict | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def do(self, name: str, work: Callable[[], dict]) -> dict | None:
        """The result of a name. Calls work() if it is missing and `only` selects it. None if it is still missing."""
        if self.get(name) is None and any(fnmatch(name, pattern) for pattern in self.only):
            write_text(self.folder / f"{name}.json", json.dumps(work()))
        return self.get(name)
