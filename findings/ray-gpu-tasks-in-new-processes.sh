#!/usr/bin/env bash
# A task of Ray that asks for a GPU gets a new process each time, so what it imported is lost. One without a GPU does not.
# Guess: both kinds run again and again in the same worker process.
# Seen: six tasks with num_gpus=1 had six processes, six without had one; with max_calls=0 those with a GPU had one, too.
# No GPU is needed: Ray counts those that it is told of.
set -euo pipefail
folder=$(mktemp -d /tmp/ray-XXXX)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ray==2.60.0
cat > "$folder/count.py" <<'END'
import logging
import os

import ray

ray.init(num_cpus=1, num_gpus=1, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=80_000_000)


def processes(**options):
    task = ray.remote(**options)(lambda: os.getpid())
    return len({ray.get(task.remote()) for _ in range(6)})


found = {"without": processes(num_cpus=1), "with": processes(num_gpus=1), "kept": processes(num_gpus=1, max_calls=0)}
print(found)
assert found["without"] == 1 and found["with"] == 6 and found["kept"] == 1, found
END
# Its servers listen on all interfaces, so they get a network of their own.
HOME="$folder" RAY_TMPDIR="$folder" RAY_USAGE_STATS_ENABLED=0 unshare --map-root-user --net --pid --fork --kill-child bash -c \
    "ip link set lo up && exec '$folder/venv/bin/python' '$folder/count.py'"
