"""Scenes with a Ray cluster of two nodes, in a namespace of its own: `tests/on_cluster.py SCENE FOLDER COMMAND...`.

killed: a node is killed in the first rung of a search, and the driver in the second; then it gets a Ctrl-C. refused:
nodes that cannot take part; the lines of the command go to FOLDER/CASE.txt. Otherwise its output goes to
FOLDER/driver.txt.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PORT, MEMORY = 6399, 80_000_000  # of the objects of Ray, which this project does not use; bytes
ADDRESS = f"127.0.0.1:{PORT}"
RAY = Path(sys.executable).with_name("ray")


def start_node(name: str, folder: Path, *more: str, before: tuple = (), environment: dict | None = None):
    """A node with one core. before: what its command begins with."""
    own = [RAY, "start", "--num-cpus=1", f"--node-name={name}", f"--object-store-memory={MEMORY}", "--block", *more]
    (log := folder / f"{name}.txt").touch()
    with open(log, "wb") as out:
        node = subprocess.Popen(
            [*before, *own], stdout=out, stderr=out, start_new_session=True, env=os.environ | (environment or {})
        )
    wait_for(lambda: "Ray runtime started" in log.read_text())
    return node


def start_head(folder: Path, *more: str) -> subprocess.Popen:
    own = (
        "--head",
        f"--port={PORT}",
        "--node-ip-address=127.0.0.1",
        "--include-dashboard=false",
        "--disable-usage-stats",
    )
    return start_node("one", folder, *own, *more)


def start_other(folder: Path, **more) -> subprocess.Popen:
    return start_node("two", folder, f"--address={ADDRESS}", **more)


def wait_for(condition: Callable, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the time is over"
        time.sleep(0.1)


def kill_tree(process: subprocess.Popen) -> None:
    """End a process and its descendants at once, as when a machine dies."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [process.pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    for pid in found:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)


def killed(folder: Path, command: list[str]) -> int:
    run, out = Path(command[command.index("--run") + 1]), folder / "driver.txt"

    def start_driver(*more: str) -> subprocess.Popen:
        with open(out, "ab") as log:
            return subprocess.Popen(
                [sys.executable, *command, f"jobs.cluster={ADDRESS}", *more], stdout=log, stderr=log
            )

    start_head(folder)
    two, driver = start_other(folder), start_driver()
    wait_for(lambda: len([*run.glob("trials/*/checkpoint.pt")]) >= 2)
    kill_tree(two)
    wait_for(lambda: "0.25 of a training" in out.read_text())
    wait_for(lambda: any("continuing from step 200" in log.read_text() for log in run.glob("trials/logs/*.txt")))
    driver.kill()
    driver.wait()
    start_other(folder)

    def logged() -> int:
        return sum(file.stat().st_size for file in run.glob("trials/*/metrics.jsonl"))

    before, driver = logged(), start_driver("--resume")
    wait_for(lambda: logged() > before)
    driver.send_signal(signal.SIGINT)
    status, ended = driver.wait(timeout=60), logged()
    time.sleep(2)
    print(f"Ctrl-C: status {status}, {logged() - ended} bytes by trainings after that", flush=True)
    return start_driver("--resume").wait()


def refused(folder: Path, command: list[str]) -> int:
    def run(case: str, *more: str) -> None:
        done = subprocess.run(
            [sys.executable, *command, f"jobs.cluster={ADDRESS}", *more], capture_output=True, text=True
        )
        (folder / f"{case}.txt").write_text(done.stderr)

    run("nowhere")
    start_head(folder, "--num-gpus=1")
    (package := folder / "other" / "torch-9.9.dist-info").mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    hidden = "unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder / "text")
    for case, more in (
        ("torch", {"environment": {"PYTHONPATH": str(folder / "other")}}),
        ("text", {"before": hidden}),
    ):
        other = start_other(folder, **more)
        run(case, "train.device=cpu")
        kill_tree(other)
    code = f"import ray, time; ray.init({ADDRESS!r}); ray.get(ray.remote(num_gpus=1)(lambda: time.sleep(60)).remote())"
    subprocess.Popen([sys.executable, "-c", code])
    time.sleep(5)
    run("gpu", "train.device=auto")
    return 0


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    sys.exit({"killed": killed, "refused": refused}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:]))
