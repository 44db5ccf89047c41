"""A folder of JSON results. Each result is computed once."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import write_text

SETTINGS = "settings.json"


class Jobs:
    """A folder of named results that were computed with the same settings. Several processes may share it."""

    def __init__(self, folder: Path, settings: list[str]):
        """Raises InputError if the folder holds results of other settings."""
        self.folder = folder
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

    def do(self, name: str, work: Callable[[], dict]) -> dict:
        """The result of a name. Calls work() if it is missing."""
        if self.get(name) is None:
            write_text(self.folder / f"{name}.json", json.dumps(work()))
        return self.get(name)
