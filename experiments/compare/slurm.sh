#!/bin/bash
# Runs the pending commands of a comparison as a job array, one command per job with one GPU each. From the root of the
# checkout, on a file system that all nodes share:
#   srun --gres=gpu:1 .venv/bin/python -m nas.compare COMPARISON.yaml --run RUN_DIR --pending > pending.txt
#   sbatch --array=1-$(wc -l < pending.txt) experiments/compare/slurm.sh pending.txt
#SBATCH --job-name=compare
#SBATCH --gres=gpu:1                  # of one type, if the cluster has several
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --output=compare-%A-%a.txt
#SBATCH --signal=TERM@300             # five minutes before the limit, so that the run can save
#SBATCH --requeue                     # SLURM restarts the job after preemption or a node failure
#SBATCH --open-mode=append            # and keeps its earlier output

command=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$1")
# SLURM signals steps of srun, not this script. The shell ignores TERM, so that it waits until the run has saved.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c "trap '' TERM; $command"
