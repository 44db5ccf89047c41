"""Trainings on the nodes of a Ray cluster: Ray places them. Everything else is in files, which all nodes must see."""

import fcntl
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from nas.core.config import Config
from nas.core.errors import STOPS, InputError, check_package
from nas.core.files import user_path
from nas.data.sources import find_splits
from nas.jobs.processes import POLL_S
from nas.jobs.tasks import ROOT, Ended, Task

# Seconds that resources of an earlier program may take to become free, and that a cluster may take to answer
FREE_S, ANSWER_S = 10, 5
INTERRUPTED = 130  # exit status after a Ctrl-C


class ClusterEngine:
    """The nodes of jobs.cluster. A task has a GPU, if the cluster has any, and train.threads CPUs.

    folder: of the runs. Raises InputError without Ray or a cluster, if no node is large enough or answers, if a node
    lacks files or has other versions than this machine, or if the cluster has no CPU or GPU free.
    """

    def __init__(self, config: Config, folder: Path):
        check_package("ray", "jobs.cluster", "cluster")
        import ray

        self.ray, address, train = ray, config.jobs.cluster, config.train
        connect(ray, address)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a node may not find this module
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self.names = {node["NodeID"]: node["NodeName"] for node in nodes}
        on_gpu = train.device == "cuda" or (train.device == "auto" and any(count(node, "GPU") for node in nodes))
        if train.threads is None and not on_gpu:
            raise InputError("jobs.cluster needs the number of threads of each training: add train.threads=1")
        self.needs = {"CPU": train.threads or 1, **({"GPU": 1} if on_gpu else {})}
        # Tasks are tried again by run_tasks(). A worker stays, although Ray would end one that had a GPU.
        self.options = {"max_retries": 0, "max_calls": 0} | {
            f"num_{kind.lower()}s": n for kind, n in self.needs.items()
        }
        self.runner = ray.remote(**self.options)(run_on_node)
        able = {node["NodeID"]: min(count(node, kind) // need for kind, need in self.needs.items()) for node in nodes}
        cpus = self.needs["CPU"]
        what = (f"{cpus} CPUs" if cpus > 1 else "a CPU") + " and a GPU" * on_gpu
        if not any(able.values()):
            advice = "start nodes with --num-gpus, or give train.device=cpu" if on_gpu else "give fewer train.threads"
            raise InputError(f"jobs.cluster={address}: no node has {what}, which a training needs; {advice}")
        alive = self.probe([node for node, most in able.items() if most], config, folder)
        if not alive:
            raise InputError(f"jobs.cluster={address}: no node answers; `ray status` shows them")
        self.wait_until_free(what)
        workers = sum(map(able.__getitem__, alive))
        self.places = [None] * min(workers, config.jobs.workers or workers)
        print(f"{len(self.places)} trainings at a time on {len(alive)} nodes of {address}", flush=True)

    def probe(self, nodes: list[str], config: Config, folder: Path) -> list[str]:
        """The nodes that are alive. Raises InputError if one sees other files, or has other versions, than this one."""
        ray, cache = self.ray, user_path(config.data.cache)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        marks = [place.absolute() / f".probe-{secrets.token_hex(8)}" for place in (folder, cache)]
        alive, made = [], [one for mark in marks for one in mark.parents if not one.exists()]
        try:
            for mark in marks:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
            lock = os.open(marks[0], os.O_RDWR)  # NFS locks only what may be written
            fcntl.flock(lock, fcntl.LOCK_EX)
            about = str(ROOT), str(Path.cwd()), list(map(str, marks)), texts_of(config)
            here = facts(*about)
            for node in nodes:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                try:
                    seen = ray.get(ray.remote(num_cpus=0, scheduling_strategy=strategy)(facts).remote(*about))
                except ray.exceptions.RayTaskError as error:
                    raise InputError(f"node {self.names[node]} cannot look at the files: {error.cause}") from None
                except ray.exceptions.RayError:  # Ray has not noticed yet
                    print(f"NOTICE: node {self.names[node]} has died", flush=True)
                    continue
                for what, own in here.items():
                    if seen[what] is None:
                        raise InputError(f"node {self.names[node]} does not see {what}; all nodes need the same files")
                    if seen[what] != own:
                        raise InputError(f"node {self.names[node]}: {what} is {seen[what]}, and here {own}")
                alive.append(node)
            os.close(lock)
            return alive
        finally:
            for mark in marks:
                mark.unlink(missing_ok=True)
            for one in made:  # a folder of a run that was refused would hold one
                with suppress(OSError):
                    one.rmdir()

    def wait_until_free(self, what: str) -> None:
        """Raises InputError if other programs use what a task needs, summed over nodes: a large one may wait longer."""
        until = time.monotonic() + FREE_S
        while any(self.ray.available_resources().get(kind, 0) < need for kind, need in self.needs.items()):
            if time.monotonic() > until:
                raise InputError(f"the cluster has not {what} free; wait for other programs, which `ray status` shows")
            time.sleep(POLL_S)

    def warm_up(self) -> None:
        """Start the server of each worker of Ray."""
        warm = self.ray.remote(**self.options)(start_on_node)
        with suppress(self.ray.exceptions.RayError):  # a node has died; the tasks go elsewhere
            self.ray.get([warm.remote(str(ROOT)) for _ in self.places])

    def run(self, task: Task, place: str | None, stop: threading.Event) -> Ended:
        ray, errors = self.ray, self.ray.exceptions
        running = self.runner.remote(str(ROOT), task.command, str(task.log.absolute()), str(Path.cwd()))
        stopped = False
        while not ray.wait([running], timeout=POLL_S)[0]:
            if stop.is_set() and not stopped:
                stopped = True
                ray.cancel(running)  # as a Ctrl-C
        try:
            status, node = ray.get(running)
            return Ended(status, self.names.get(node, node))
        except (errors.TaskCancelledError, KeyboardInterrupt):
            return Ended(INTERRUPTED)
        except errors.RayTaskError as error:
            with open(task.log, "a", encoding="utf-8") as log:
                log.write(f"{error.cause}\n")
            return Ended(1)
        except errors.RayError:  # the worker, or its node
            return Ended(-1)


def connect(ray, address: str) -> None:
    """Connect to a cluster, once. Raises InputError if there is none."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    found, handlers = find_cluster(address), {number: signal.getsignal(number) for number in STOPS}
    try:
        ray.init(address=found, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"jobs.cluster={address}: cannot connect to {found}: {reason}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def find_cluster(address: str) -> str:
    """IP:PORT of a cluster, which answers; Ray itself would wait for minutes. auto: the one that this machine has."""
    known = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    found = address
    if address == "auto":
        found = os.environ.get("RAY_ADDRESS") or (known.read_text().strip() if known.exists() else "")
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, ValueError):
        advice = "start it with `ray start --head` on one machine, and `ray start --address IP:PORT` on this one"
        raise InputError(
            f"jobs.cluster={address}: no Ray cluster answers; {advice}, and give auto or IP:PORT"
        ) from None
    return found


def count(node: dict, kind: str) -> int:
    return int(node["Resources"].get(kind, 0))


def texts_of(config: Config) -> list[str]:
    """The files of the text and of the tokenizer that the configuration names."""
    named = [user_path(name) for name in (config.data.source, config.data.tokenizer)]
    files = [file for path in named for file in (find_splits(path).values() if path.is_dir() else [path])]
    return [str(file.absolute()) for file in files if file.is_file()]


def facts(root: str, folder: str, marks: list[str], texts: list[str]) -> dict[str, str | None]:
    """What must be equal on all nodes. It runs there without this module, so it imports what it needs.

    marks: files in folders that all nodes see; the first is locked.
    """
    import fcntl
    import hashlib
    import platform
    from contextlib import suppress
    from importlib import metadata
    from pathlib import Path

    def digest(paths) -> str | None:
        whole = hashlib.sha256()
        for path in paths:
            if not Path(path).is_file():
                return None
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    whole.update(block)
        return whole.hexdigest()[:12]

    found = {"Python": platform.python_version(), "torch": None, f"the folder {folder}": None}
    with suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    if Path(folder).is_dir():
        found[f"the folder {folder}"] = "there"
    code = sorted(path for part in ("models", "nas") for path in Path(root, part).glob("**/*.py"))
    found[f"the project in {root}"] = digest([Path(root, "retrain.py"), *code])
    found |= {f"the folder {Path(mark).parent}": "there" if Path(mark).exists() else None for mark in marks}
    found |= {f"the text {text}": digest([text]) for text in texts}
    with suppress(FileNotFoundError), open(marks[0], "r+b") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found[f"a lock in {Path(marks[0]).parent}"] = "free"
        except BlockingIOError:
            found[f"a lock in {Path(marks[0]).parent}"] = "held"
    return found


def enter(root: str) -> None:
    """Make the project importable in a worker of Ray, and its server's processes free of Ray's own program."""
    import sys

    if root not in sys.path:
        sys.path.insert(0, root)
    vars(sys.modules["__main__"]).pop("__file__", None)  # else each of them would import it again


def start_on_node(root: str) -> None:
    enter(root)
    from nas.jobs.processes import start_server

    start_server()


def run_on_node(root: str, command: list[str], log: str, folder: str) -> tuple[int, str]:
    """Run a command in a fork of the worker's server, as on the own machine. Returns its exit status, and the node."""
    import os
    from pathlib import Path

    import ray

    enter(root)
    from nas.jobs.processes import start_command, wait_for

    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # see run_command() of nas.core.errors
    node = ray.get_runtime_context().get_node_id()
    return wait_for(start_command(command, Path(log), Path(log), Path(folder))), node
