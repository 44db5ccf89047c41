"""Twelve trainings by each engine: `unshare --net --pid --fork --mount-proc python experiments/bench/cluster.py`.

One at a time and two at a time on this machine, and on two Ray nodes of one core each, with a new engine for each. The
time includes all starts but that of the nodes. A task that does nothing gives the overhead. Needs root and two cores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import FRONTIER, print_row
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.files import write_yaml
from nas.core.pattern import FORMAT, interleaved
from nas.core.run_folder import RESULTS
from tests.on_cluster import ADDRESS, start_head, start_other

TRAININGS, NOTHING = 12, 20
OPTIONS = "data.source=stdlib", "train.threads=1", "train.evaluate_every=0", "mixture.counts=0", "mixture.cache=[]"
OPTIONS += "mixture.states=0", "train.residual=false"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of a training (default 600)")
    arguments = parser.parse_args()
    from nas.data.corpus import prepare
    from nas.jobs.engines import open_engine
    from nas.jobs.tasks import Task, run_tasks, training_task
    from nas.training.device import choose_runtime

    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    write_yaml(pattern := folder / "pattern.yaml", {"format": FORMAT, "blocks": interleaved(4)})
    (nothing := folder / "nothing.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()")
    prepare(load_config(FRONTIER, [*OPTIONS]).data, print)
    engines = {"one at a time": ["jobs.workers=1"], "two at a time": ["jobs.workers=2"]}
    engines["two nodes of Ray"] = [f"jobs.cluster={ADDRESS}"]
    start_head(folder)
    start_other(folder)
    print_row("12 trainings", "seconds", "of two at a time", "a task that does nothing", header=True)
    times = {}
    for name, own in engines.items():
        place = folder / name.replace(" ", "-")
        config = load_config(FRONTIER, [*OPTIONS, *own])
        began = time.perf_counter()
        engine = open_engine(config, choose_runtime(config.train), place)
        engine.warm_up()
        tasks = []
        for seed in range(1, TRAININGS + 1):
            given = pattern, FRONTIER, *OPTIONS, f"train.steps={arguments.steps}", f"seed={seed}"
            tasks.append(training_task(str(seed), [*given], place / str(seed), RESULTS, place / "logs" / f"{seed}.txt"))
        assert run_tasks(tasks, engine) == {}
        times[name] = time.perf_counter() - began
        empty = [place / f"nothing-{number}" for number in range(NOTHING)]
        began = time.perf_counter()
        run_tasks([Task(one.name, [str(nothing), str(one)], one, place / "log.txt") for one in empty], engine)
        overhead = (time.perf_counter() - began) * len(engine.places) / NOTHING
        ratio = times[name] / times.get("two at a time", float("nan"))
        print_row(name, f"{times[name]:.1f}", f"{ratio:.3f}", f"{overhead:.2f} s")


if __name__ == "__main__":
    run_command(main)
