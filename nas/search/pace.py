"""How many trials fit the time of a search, whatever the load of the machine."""

import time
from pathlib import Path

from nas.core.files import read_jsonl, write_jsonl
from nas.search.trials import Estimate

Batches = list[tuple[float, int]]  # the share of a training that each adds, and its number of networks


class Pace:
    """Chooses what runs next, from the time that trials took so far. Choices are kept, so that a search which goes on
    repeats them. Its pauses do not count, nor what an interruption lost.

    file: of the choices. seconds: for the trials, and what follows them. last: the batches that follow them.
    """

    def __init__(self, file: Path, seconds: float, estimate: Estimate, last: Batches):
        self.file, self.estimate, self.last, self.slower = file, estimate, last, 1.0
        self.made, self.repeated = read_jsonl(file), 0
        self.left = self.made[-1]["left"] if self.made else seconds
        self.began, self.running = time.monotonic(), []

    def choose(self, choices: list[Batches], later: Batches) -> int:
        """The index of the first choice of batches that leaves time for later ones; if none does, that of the last."""
        if self.repeated < len(self.made):
            known = self.made[self.repeated]
            self.slower, self.repeated = known["slower"], self.repeated + 1
            return known["choice"]
        now = time.monotonic()
        if self.running:
            self.slower = (now - self.began) / self.estimate.seconds(self.running)
        self.left, self.began = self.left - (now - self.began), now
        needed = [self.slower * self.estimate.seconds([*own, *later, *self.last]) for own in choices]
        choice = next((index for index, one in enumerate(needed) if one <= self.left), len(choices) - 1)
        self.made.append({"choice": choice, "left": self.left, "slower": self.slower})
        write_jsonl(self.file, self.made)
        self.running, self.repeated = choices[choice], len(self.made)
        return choice
