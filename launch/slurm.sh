#!/usr/bin/env bash
# One process per node, all GPUs of the node in it. From the repository root, on storage that all nodes share:
#
#     sbatch --nodes 4 launch/slurm.sh configs/my.yaml [mesh.fsdp=8 ...]
#
# All arguments of the script are passed to `jaxmllm train`. See launch/README.md for the variables.
#
# With --resume=auto the run begins in a new run.directory and continues in one that holds it, so a
# requeued job continues by itself from its last checkpoint:
#   preempted, or a node fails   Slurm requeues the job (--requeue)
#   the time is up               two minutes before, the run saves a checkpoint and this script requeues the job
#   scancel, or an error         the run saves or ends with a line; the job is not requeued
# A node that fails gives no signal: set checkpoint.every=N, because otherwise nothing is saved
# before the end or a signal.

#SBATCH --job-name=jaxmllm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# USR1 tells this script, and only it, that the time is up; scancel and preemption send TERM.
#SBATCH --signal=B:USR1@120

set -euo pipefail
if (($# == 0)); then
    echo "usage: sbatch launch/slurm.sh CONFIG [arguments of jaxmllm train]" >&2
    exit 2
fi
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A different port for each job, so that two jobs can share a node.
export JAXMLLM_COORDINATOR="$first:$((20000 + SLURM_JOB_ID % 20000))"
export JAXMLLM_PROCESSES=$SLURM_NTASKS

tasks=
time_is_up=no
trap 'time_is_up=yes; kill -TERM ${tasks:-$!}' USR1 # srun passes it on to all processes
# Slurm sends TERM to the processes itself, so ignore it here and wait for them. With a handler
# instead of '', a TERM at the moment when the tasks end makes bash lose their exit code.
trap '' TERM
# The process number is known only inside srun.
(
    trap - TERM
    exec srun --kill-on-bad-exit=1 --label --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c \
        'export JAXMLLM_PROCESS_ID=$SLURM_PROCID; exec .venv/bin/python -m jaxmllm train --resume=auto --config "$@"' \
        train "$@"
) &
tasks=$!

code=0
wait "$tasks" || code=$?
# `wait` returns early when the USR1 trap runs.
while kill -0 "$tasks" 2>/dev/null; do
    code=0
    wait "$tasks" || code=$?
done
# The run has saved, or finished at that very moment: then the next job finds nothing left to do.
if [[ $time_is_up == yes && $code == 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
