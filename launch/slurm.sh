#!/usr/bin/env bash
# One process per node, all GPUs of the node in it. From the repository root, on storage that all nodes share:
#
#     sbatch --nodes 4 launch/slurm.sh configs/my.yaml [mesh.fsdp=8 ...]
#
# Everything after the script's name goes to `jaxmllm train`. See launch/README.md for the variables.
#
# The run begins in a new run.directory and continues in one that holds it (--resume=auto), so a job that is requeued
# continues by itself from its last checkpoint:
#   preempted, or a node fails   Slurm requeues the job (--requeue)
#   the time is up               two minutes before, the run saves a checkpoint and this script requeues the job
#   scancel, or an error         the run saves or ends with a line; the job is not requeued
# A node that fails gives no signal: set checkpoint.every=N, without which nothing is saved before the end or a signal.

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
# USR1 to this script alone says that the time is up; scancel and preemption send TERM.
#SBATCH --signal=B:USR1@120

set -euo pipefail
if (($# == 0)); then
    echo "usage: sbatch launch/slurm.sh CONFIG [arguments of jaxmllm train]" >&2
    exit 2
fi
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Another port for each job, so that two jobs may share a node.
export JAXMLLM_COORDINATOR="$first:$((20000 + SLURM_JOB_ID % 20000))"
export JAXMLLM_PROCESSES=$SLURM_NTASKS

tasks=
time_is_up=no
trap 'time_is_up=yes; kill -TERM ${tasks:-$!}' USR1 # srun passes it on to all processes
# The processes have TERM from Slurm: wait for them. With a handler in place of '', a TERM in the moment in which the
# tasks end makes bash forget how they ended.
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
# The trap of USR1 ends `wait` early.
while kill -0 "$tasks" 2>/dev/null; do
    code=0
    wait "$tasks" || code=$?
done
# Saved, or done in that very moment: then the next job finds nothing left to do.
if [[ $time_is_up == yes && $code == 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
