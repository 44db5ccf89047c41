"""Stage 4: draw the history of pi as a GIF, and the figures of a run."""

import argparse
from pathlib import Path

from nas.core.errors import InputError, run_command
from nas.core.files import check_parent, read_jsonl, read_yaml
from nas.core.outcome import read_pi
from nas.core.run_folder import CONFIG, METRICS, OUTCOME
from nas.derivation.runs import current_pattern


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    run_help = "--run folder of a search, or of a retrain run (which gives no GIF)"
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help=run_help)
    parser.add_argument("--out", metavar="FILE.gif", type=Path, help="default: RUN_DIR/pi.gif; figures go beside it")
    arguments = parser.parse_args()
    run, gif = arguments.run, arguments.out
    if gif and gif.suffix.lower() != ".gif":
        raise InputError(f"--out {gif} must end in .gif")
    if gif:
        check_parent(gif)
    config = read_yaml(run / CONFIG) if (run / CONFIG).is_file() else {}
    if config.get("stage") != "retrain":
        written = draw_search(run, gif or run / "pi.gif")
    elif gif:
        raise InputError(f"--out: {run} is a retrain run and has no pi to animate; remove --out to draw its curves")
    elif not config["pattern"]:
        raise InputError(f"{run} has no network, so there is nothing to draw")
    else:
        written = [*draw_curves(run, run), draw_pattern(run, config["pattern"])]
    print("written: " + " ".join(map(str, written)))


def draw_search(run: Path, gif: Path) -> list[Path]:
    """Draw learning curves, the history of pi and the pattern. Returns the files."""
    lines = read_pi(run)
    from nas.reporting import figures  # imported late because matplotlib is slow to import

    history = figures.pi_history(lines)
    if len(history) == 1 and not (run / OUTCOME).exists():
        raise InputError(f"{run}: pi has not changed until step {lines[-1]['step']}; let the search continue")
    pi, over_time = (gif.with_name(f"{name}.png") for name in ("pi", "pi_over_time"))
    figures.final_pi(history, pi)
    figures.pi_over_time(history, over_time)
    written = [*draw_curves(run, gif.parent), pi, over_time, draw_pattern(gif.parent, current_pattern(run))]
    frames = figures.animate(history, gif)
    print(f"{gif}: {frames} frames of {len(lines)} logged steps, {gif.stat().st_size / 1e6:.2f} MB")
    return [*written, gif]


def draw_curves(run: Path, folder: Path) -> list[Path]:
    """Draw learning curves. Returns the file in a list, which is empty if no metrics were logged."""
    from nas.reporting.figures import learning_curves

    if metrics := read_jsonl(run / METRICS):
        learning_curves(metrics, folder / "learning_curves.png")
    return [folder / "learning_curves.png"] if metrics else []


def draw_pattern(folder: Path, blocks: list[str]) -> Path:
    from nas.reporting.figures import pattern_strip

    pattern_strip(blocks, folder / "pattern.png")
    return folder / "pattern.png"


if __name__ == "__main__":
    run_command(main)
