#!/usr/bin/env bash
# A job in many small ones, without Ray: sbatch infra/slurm-array.sh JOB.yaml
# Tasks start, are preempted and are requeued as the cluster likes; each claims shards that nobody
# does. The last one writes the index. To be sure of it whatever ends the tasks, add a job for it:
#   id=$(sbatch --parsable infra/slurm-array.sh JOB.yaml)
#   sbatch --dependency=afterany:"$id" --wrap "earmill extract JOB.yaml --finish"
#SBATCH --job-name=earmill
#SBATCH --array=0-99
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=04:00:00
#SBATCH --requeue
# A requeued task goes on in its log.
#SBATCH --open-mode=append
# Two minutes before the time limit: what is in flight is committed, the rest left to others.
#SBATCH --signal=B:USR1@120
set -euo pipefail
job=${1:?usage: sbatch infra/slurm-array.sh JOB.yaml}
# exec: the signal is for the driver. `scancel` leaves it the cluster's KillWait alone, 30 s as a rule.
exec earmill extract "$job" --set run.executor=slurm-array --set run.grace_s=100
