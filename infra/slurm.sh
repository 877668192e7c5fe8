#!/usr/bin/env bash
# One Ray cluster over the nodes of a Slurm job: sbatch infra/slurm.sh JOB.yaml
#SBATCH --job-name=earmill
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time limit: what is in flight is committed, a requeued job does the rest.
#SBATCH --signal=B:USR1@120
# For GPUs, which a job takes unless its run.device is cpu, add: #SBATCH --gpus-per-node=1
set -euo pipefail
job=${1:?usage: sbatch infra/slurm.sh JOB.yaml}
cpus=${SLURM_CPUS_PER_TASK:-1}
# Since Slurm 22.05 srun does not take it from sbatch, and may bind a step to one core.
export SRUN_CPUS_PER_TASK=$cpus
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ip=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')
# Jobs may share a node, and so may users: a port, a folder and a token of this job alone.
address=$ip:$((20000 + SLURM_JOB_ID % 10000))
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | base64)}
srun --nodes=1 --ntasks=1 -w "$head" ray start --head --node-ip-address="$ip" --port="${address##*:}" \
  --temp-dir="/tmp/ray-$SLURM_JOB_ID" --num-cpus="$cpus" --include-dashboard=false --disable-usage-stats --block &
cluster=$!
for _ in {1..120}; do
  if ray health-check --address="$address" 2>/dev/null; then break; fi
  kill -0 "$cluster" # a head that did not start ends the job here
  sleep 1
done
workers=$((SLURM_JOB_NUM_NODES - 1))
if [ "$workers" -gt 0 ]; then
  srun --nodes="$workers" --ntasks="$workers" --exclude="$head" \
    ray start --address="$address" --num-cpus="$cpus" --block &
fi
# A requeued job goes on from its commits.
RAY_ADDRESS=$address earmill extract "$job" --resume --set run.grace_s=100 &
driver=$!
# bash takes the signals of Slurm; the driver is told.
trap 'kill -TERM "$driver" 2>/dev/null || true' USR1 TERM
status=0
wait "$driver" || status=$?
while kill -0 "$driver" 2>/dev/null; do
  status=0
  wait "$driver" || status=$?
done
exit "$status"
