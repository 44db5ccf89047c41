"""How many trials fit the time of a search, whatever the load of the machine."""

import time
from pathlib import Path

from nas.core.files import read_jsonl, write_jsonl
from nas.search.trials import Estimate

Batches = list[tuple[float, int]]  # the share of a training that each adds, and its number of networks
TOLERANCE = 1.1  # of the time that is left; a batch of trials varies as much


class Pace:
    """Chooses what runs next, from the time that trials took so far. Choices are kept, so that a search which goes on
    repeats them. Its pauses do not count, nor what an interruption lost.

    file: of the choices. seconds: for the trials, and what follows them. last: those estimated of what follows.
    """

    def __init__(self, file: Path, seconds: float, estimate: Estimate, last: float):
        self.file, self.estimate, self.last, self.slower = file, estimate, last, 1.0
        self.made, self.repeated = read_jsonl(file), 0
        self.left = self.made[-1]["left"] if self.made else seconds
        self.began, self.running = time.monotonic(), []

    def choose(self, choices: list[Batches], planned: int | None = None) -> int:
        """The index of the first choice that fits the time; if none does, of the shortest. The first batch of each runs
        now, and the others are those that it must leave time for. planned: the choice that may take TOLERANCE of it.
        """
        if self.repeated < len(self.made):
            known = self.made[self.repeated]
            self.slower, self.repeated = known["slower"], self.repeated + 1
            return known["choice"]
        now = time.monotonic()
        if self.running:
            self.slower = (now - self.began) / self.estimate.seconds(self.running)
        self.left, self.began = self.left - (now - self.began), now
        needed = [self.slower * (self.estimate.seconds(own) + self.last) for own in choices]
        fits = [one <= self.left * (TOLERANCE if index == planned else 1) for index, one in enumerate(needed)]
        choice = fits.index(True) if True in fits else needed.index(min(needed))
        self.made.append({"choice": choice, "left": self.left, "slower": self.slower})
        write_jsonl(self.file, self.made)
        self.running, self.repeated = choices[choice][:1], len(self.made)
        return choice

    def run_instead(self, shares: list[float]) -> None:
        """Replace the batch that was planned. shares: of a training that each network adds; untried ones add all."""
        if self.running:
            self.running = [(share, 1) for share in sorted(shares, reverse=True)[:: self.estimate.at_once]]
