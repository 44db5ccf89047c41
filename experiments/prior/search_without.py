"""search.py with a prior that has not seen a text:
`python experiments/prior/search_without.py TEXT CONFIG --run RUN`.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.prior.fit import COUNTED, prior_of, read_points

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    import nas.search.strategy

    (alone, mixed), seen = read_points(), sys.argv.pop(1)
    others = (own for text, own in alone.items() if text not in (seen, *COUNTED))
    prior = prior_of(others, [mixed[text] for text in COUNTED if text != seen])
    nas.search.strategy.prior_for = lambda config: prior
    runpy.run_path(str(ROOT / "search.py"), run_name="__main__")
