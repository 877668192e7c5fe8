#!/usr/bin/env bash
# One Ray cluster over the nodes of a Slurm job: sbatch infra/slurm.sh JOB.yaml
#SBATCH --job-name=earmill
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --requeue
# For GPUs, which a job takes unless its run.device is cpu, add: #SBATCH --gpus-per-node=1
set -euo pipefail
job=${1:?usage: sbatch infra/slurm.sh JOB.yaml}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}'):6379
# One token per job: nobody else on the machines can join or submit.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | base64)}
srun --nodes=1 --ntasks=1 -w "$head" ray start --head --port=6379 --block &
sleep 10
workers=$((SLURM_JOB_NUM_NODES - 1))
if [ "$workers" -gt 0 ]; then
  srun --nodes="$workers" --ntasks="$workers" --exclude="$head" ray start --address="$address" --block &
fi
# A requeued job goes on from its commits.
RAY_ADDRESS=$address earmill extract "$job" --resume
