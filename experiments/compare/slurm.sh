#!/bin/bash
# A comparison over a cluster, each of eight jobs with a GPU. From the root of the checkout, on a file system of all nodes:
#   sbatch experiments/compare/slurm.sh COMPARISON.yaml --run RUN_DIR [section.key=value ...]
# After the time limit, or where a part failed, the same command goes on: what has finished is not done again.
#SBATCH --job-name=compare
#SBATCH --array=0-7                   # from 0 without gaps: the number in it says which share a job does
#SBATCH --gres=gpu:1                  # of one type, if the cluster has several: share 0 measures latencies for all
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --output=compare-%A-%a.txt
#SBATCH --signal=TERM@300             # five minutes before the limit, so that runs can save
#SBATCH --requeue                     # after preemption or the failure of a node SLURM starts the job again by itself,
#SBATCH --open-mode=append            # and what it said before stays

# srun, since the signal goes to its steps and not to this script; it asks for the CPUs anew, or SLURM gives it one.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" .venv/bin/python -m nas.compare "$@" \
    --share "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
