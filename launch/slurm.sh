#!/usr/bin/env bash
# One process per node, all GPUs of the node in it. From the repository root, on storage that all nodes share:
#
#     sbatch --nodes 4 launch/slurm.sh configs/my.yaml [--resume] [--set mesh.fsdp=8 ...]
#
# Everything after the script's name goes to jaxmllm.train. See launch/README.md for the variables.

#SBATCH --job-name=jaxmllm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Ask for SIGTERM two minutes before the time is up: the run saves a checkpoint and exits.
#SBATCH --signal=TERM@120
# A requeued job starts over unless the command says --resume.
#SBATCH --requeue

set -euo pipefail
if (($# == 0)); then
    echo "usage: sbatch launch/slurm.sh CONFIG [arguments of jaxmllm.train]" >&2
    exit 2
fi
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A port of its own for each job, so that two jobs may share a node.
export JAXMLLM_COORDINATOR="$first:$((20000 + SLURM_JOB_ID % 20000))"
export JAXMLLM_PROCESSES=$SLURM_NTASKS

# The process number is known only inside srun. `exec` lets Python itself receive the signals.
exec srun --kill-on-bad-exit=1 --label --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c \
    'export JAXMLLM_PROCESS_ID=$SLURM_PROCID; exec .venv/bin/python -m jaxmllm.train --config "$@"' train "$@"
