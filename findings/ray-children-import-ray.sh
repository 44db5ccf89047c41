#!/usr/bin/env bash
# A task of Ray starts a child by multiprocessing (spawn or forkserver), whose function needs nothing but the standard library.
# Guess: the child is as quick to start as one of a small script, because the task's own program is not a script.
# Seen: the main module of a task is Ray's default_worker.py, so each child runs it again, imports ray, and takes several times as
# long. Without __file__ in that module it does not.
set -euo pipefail
folder=$(mktemp -d /tmp/ray-XXXX)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ray==2.60.0
cat > "$folder/child.py" <<'END'
import logging

import ray

ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=80_000_000)


@ray.remote
def modules(hide):
    import multiprocessing
    import sys
    from concurrent.futures import ProcessPoolExecutor

    if hide:
        del sys.modules["__main__"].__file__
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(eval, "'ray' in __import__('sys').modules").result()


found = ray.get(modules.remote(False)), ray.get(modules.remote(True))
print("ray is imported in the child:", found)
assert found == (True, False), found
END
# Its servers listen on all interfaces, so they get a network of their own.
HOME="$folder" RAY_TMPDIR="$folder" RAY_USAGE_STATS_ENABLED=0 unshare --map-root-user --net --pid --fork --kill-child bash -c \
    "ip link set lo up && exec '$folder/venv/bin/python' '$folder/child.py'"
