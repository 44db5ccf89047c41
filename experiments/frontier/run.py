"""All stages for one budget: `python experiments/frontier/run.py 0.65 --out runs/frontier-0.65`.

The search chooses the network by trials, and its training goes on from its trial. The folder gets pattern.yaml,
networks.png and report.html. Repeat the command to resume it.
"""

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.core.run_folder import run_options

CONFIG = Path(__file__).with_name("frontier.yaml")
ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("budget", help="a ratio to the time of the reference, such as 0.65, or a time such as 20ms")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as data.source=FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_intermixed_args()
    out, overrides = arguments.out, arguments.overrides
    search, pattern, training = out / "search", out / "pattern.yaml", out / "training"
    budget = f"search.latency.target={arguments.budget}"
    stages = [[ROOT / "search.py", CONFIG, *run_options(search), budget, *overrides]]
    if not pattern.exists():
        stages.append([ROOT / "derive.py", search, "--out", pattern])
    stages.append([ROOT / "retrain.py", pattern, CONFIG, *run_options(training), *overrides])
    stages.append(["-m", "nas.report", search, training, "--out", out / "report.html", "--title", out.name])
    out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        if status := subprocess.run([sys.executable, *map(str, stage)]).returncode:
            sys.exit(status)


if __name__ == "__main__":
    main()
