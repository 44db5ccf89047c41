"""Where tasks run: the CPU or the GPUs of this machine, or a cluster."""

import os
import threading
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.run_folder import count_cores
from nas.jobs.cluster import ClusterEngine
from nas.jobs.processes import start_command, start_server, wait_for
from nas.jobs.tasks import Ended, Engine, Task


@dataclass
class LocalEngine:
    """This machine. places: GPUs as CUDA_VISIBLE_DEVICES names them; None: the CPU, or all of them."""

    places: list[str | None]

    def warm_up(self) -> None:
        start_server()

    def run(self, task: Task, place: str | None, stop: threading.Event) -> Ended:
        environment = os.environ if place is None else {**os.environ, "CUDA_VISIBLE_DEVICES": place}
        process = start_command(task.command, task.log, task.log, environment=environment)
        return Ended(wait_for(process, stop))


def open_engine(config: Config, runtime, folder: Path) -> Engine:
    """The engine of jobs.cluster. runtime: a Runtime. folder: of the runs, which all nodes of a cluster must see.

    On this machine there is one task on each GPU; on its CPU as many as its cores have room for. Raises InputError.
    """
    workers, gpus = config.jobs.workers, runtime.gpus
    if config.jobs.cluster is not None:
        return ClusterEngine(config, folder)
    if not gpus and (workers or 1) > 1 and config.train.threads is None:
        share = max(1, count_cores() // workers)
        raise InputError(f"jobs.workers={workers} needs a number of threads for each: add train.threads={share}")
    workers = workers or len(gpus) or max(1, count_cores() // runtime.threads)
    return LocalEngine([*islice(cycle(gpus or [None]), workers)])
