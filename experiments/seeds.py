"""Train patterns under one configuration, each with several seeds, and print them side by side:

    python experiments/seeds.py CONFIG.yaml --patterns A.yaml B.yaml --seeds 1 2 3 --out FOLDER [section.key=value ...]

Each run is one of retrain.py --resume, in FOLDER/<pattern file's name>-<seed>: what has finished is not trained again,
what was interrupted goes on, and a run of another pattern or configuration is refused. So several processes may share
the work, each with its own patterns or seeds. --report prints what is there and trains nothing. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nas.pattern import abbreviate  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG.yaml", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--patterns", nargs="+", required=True, type=Path, metavar="PATTERN.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--report", action="store_true", help="train nothing, print what is there")
    arguments = parser.parse_intermixed_args()
    names = [pattern.stem for pattern in arguments.patterns]
    if len(set(names)) < len(names):
        parser.error(f"--patterns: two files have one name ({' '.join(names)}), by which their runs are told apart")
    return arguments


def train(pattern: Path, seed: int, run: Path, arguments: argparse.Namespace) -> None:
    """Ends the program where a run fails, with that run's own message above."""
    options = [*arguments.overrides, f"seed={seed}"]
    command = [sys.executable, ROOT / "retrain.py", pattern, arguments.config, "--run", run, "--resume", *options]
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)


def spread(values: list[float]) -> str:
    """Mean and standard error."""
    if len(values) < 2:
        return f"{values[0]:.4f}"
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.4f}"


def report(arguments: argparse.Namespace) -> dict:
    """Print what is there: means and standard errors over seeds, medians of rates and times."""
    print(
        "| pattern | blocks | seeds | parameters | bits per byte, valid | test | FLOPs per token | tokens/s | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    found = {}
    for pattern in arguments.patterns:
        paths = [arguments.out / f"{pattern.stem}-{seed}" / "results.yaml" for seed in arguments.seeds]
        results = [yaml.safe_load(path.read_text()) for path in paths if path.exists()]
        if not results:
            continue
        bits = {split: [about[split]["bits_per_byte"] for about in results] for split in ("valid", "test")}
        first = results[0]
        rate, seconds = (np.median([about[key] for about in results]) for key in ("train_tokens_per_s", "wall_time_s"))
        cells = [pattern.stem, abbreviate(first["pattern"]), len(results), f"{first['parameters']:,}"]
        cells += [spread(bits["valid"]), spread(bits["test"]), f"{first['flops_per_token']:,.0f}"]
        print("| " + " | ".join(map(str, [*cells, f"{rate:,.0f}", f"{seconds:.0f}"])) + " |")
        found[pattern.stem] = bits
    return found


def main() -> None:
    arguments = parse_arguments()
    for seed in [] if arguments.report else arguments.seeds:
        for pattern in arguments.patterns:
            train(pattern, seed, arguments.out / f"{pattern.stem}-{seed}", arguments)
    print(json.dumps(report(arguments)))


if __name__ == "__main__":
    main()
