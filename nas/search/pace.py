"""How many trials fit the time of a search, whatever the load of the machine."""

import json
import time
from pathlib import Path

from nas.core.files import read_jsonl
from nas.search.trials import Estimate

Batches = list[tuple[float, int]]  # the share of a training that each adds, and its number of networks


class Pace:
    """Chooses what runs next, from the time that trials took so far. Choices are kept, so that a search which goes on
    repeats them. Its pauses do not count, nor what an interruption lost.

    file: of the choices. seconds: for the trials, and what follows them. last: the batches that follow them.
    """

    def __init__(self, file: Path, seconds: float, estimate: Estimate, last: Batches):
        self.file, self.estimate, self.last, self.slower = file, estimate, last, 1.0
        self.known = read_jsonl(file)
        self.left = self.known[-1]["left"] if self.known else seconds
        self.began, self.running = time.monotonic(), []

    def choose(self, choices: list[Batches], later: Batches) -> int:
        """The index of the first choice of batches that leaves time for later ones; if none does, that of the last."""
        if self.known:
            self.running, known = [], self.known.pop(0)
            self.slower = known["slower"]
            return known["choice"]
        now = time.monotonic()
        if self.running:
            self.slower = (now - self.began) / self.estimate.seconds(self.running)
        self.left, self.began = self.left - (now - self.began), now
        needed = [self.slower * self.estimate.seconds([*own, *later, *self.last]) for own in choices]
        choice = next((index for index, one in enumerate(needed) if one <= self.left), len(choices) - 1)
        with open(self.file, "a") as file:
            file.write(json.dumps({"choice": choice, "left": self.left, "slower": self.slower}) + "\n")
        self.running = choices[choice]
        return choice
