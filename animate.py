"""Stage 4: pictures of a run. The evolution of pi as a GIF, and stills for a report."""

import argparse
from pathlib import Path

from nas.core.errors import InputError, run_command
from nas.core.files import read_jsonl, read_yaml
from nas.core.metrics import read_pi


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run", metavar="RUN_DIR", type=Path, help="the --run folder of a search (of a retrain: curves only)"
    )
    parser.add_argument("--out", metavar="FILE.gif", type=Path, help="default: RUN_DIR/pi.gif; stills go into RUN_DIR")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    run = arguments.run
    is_retrain = (run / "config.yaml").is_file() and read_yaml(run / "config.yaml").get("stage") == "retrain"
    history = [] if is_retrain else read_pi(run)
    if len(history) == 1:
        raise InputError(f"{run} has one logged step of pi: an animation needs at least two; let the search go on")
    if arguments.out and is_retrain:
        raise InputError(f"--out: {run} is a retrain run and has no pi to animate; leave --out away for its curves")
    if arguments.out and arguments.out.suffix.lower() != ".gif":
        raise InputError(f"--out {arguments.out} must end in .gif")
    metrics = read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []

    from nas.reporting import curves, pi_figures

    written = []

    def draw(name: str, picture, *content) -> None:
        picture(*content, run / name)
        written.append(run / name)

    if metrics:
        draw("learning_curves.png", curves.learning_curves, metrics)
    if is_retrain:
        draw("pattern.png", pi_figures.pattern_strip, read_yaml(run / "config.yaml")["pattern"])
    else:
        last = history[-1]
        likeliest = [last["operations"][row.index(max(row))] for row in last["pi"]]
        draw("pi.png", pi_figures.final_pi, history)
        draw("pi_over_time.png", pi_figures.pi_over_time, history)
        draw("entropy.png", pi_figures.entropy_over_time, history)
        draw("pattern.png", pi_figures.pattern_strip, likeliest)
        out = arguments.out or run / "pi.gif"
        frames = pi_figures.animate(history, out)
        written.append(out)
        print(f"{out}: {frames} frames of {len(history)} logged steps, {out.stat().st_size / 1e6:.2f} MB")
    print("written: " + " ".join(str(path) for path in written))


if __name__ == "__main__":
    run_command(main)
