"""Run infra/slurm-array.sh and infra/slurm.sh on a Slurm of this machine.

A controller and two daemons that call themselves nodes, of the distribution's packages (`apt-get
install slurmctld slurmd slurm-client`, as root), in a folder of their own and without cgroups. An
array of tasks, one of which is cancelled midway and one requeued; a job that writes the index
behind them; then a Ray cluster over both nodes, requeued midway. Prints what it runs and what that
says, checks both outputs, and compares their features byte by byte; ends with an error when
anything is not as stated. docs/infra_run.md has such a run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import soundfile

import earmill
from earmill.jobs.demo_audio import RMS, speech

INFRA = Path(__file__).parents[2] / "infra"
CLIPS, CLIP_S, RATE_HZ = 40, 6.0, 16000
# A model that is slow enough for a task to be stopped in its middle.
JOB = """\
name: on-slurm
source: {{kind: files, uri: {root}/corpus}}
extract:
  - model: king2019
    fs_hz: 44100
    streams: {{modulation: {{frame_rate_hz: 100, pool: rms}}}}
output: {{uri: {root}/out/{name}, formats: [parquet], shard_seconds: 12}}
run: {{device: cpu, threads_per_worker: 1}}
"""
CONF = """\
ClusterName=local
SlurmctldHost={host}
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=alpha NodeAddr=127.0.0.1 NodeHostname={host} Port=17001 CPUs=2 RealMemory=8000
NodeName=beta NodeAddr=127.0.0.1 NodeHostname={host} Port=17002 CPUs=2 RealMemory=8000
PartitionName=local Nodes=alpha,beta Default=YES MaxTime=INFINITE State=UP
"""
TOLD_FROM_RAY = re.compile(r"scripts\.py|cli_output_helpers|usage_lib|^\s*$")


def run(command: str, *, fails: bool = False) -> str:
    """Print a command and what it says; an error code ends everything, unless it may fail."""
    print(f"\n$ {command}", flush=True)
    done = subprocess.run(
        command,
        shell=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    print(done.stdout.rstrip(), flush=True)
    if done.returncode and not fails:
        raise SystemExit(f"exit code {done.returncode}")
    return done.stdout.strip()


def wait_for(what: str, holds: Callable[[], bool], limit_s: float = 400.0) -> None:
    """Until it holds; prints how long that took."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > limit_s:
            raise SystemExit(f"{what}: not within {limit_s:g} s")
        time.sleep(0.5)
    print(f"\n# {what}: after {time.monotonic() - begun:.0f} s", flush=True)


def commits(output: Path) -> int:
    """Shards that are done."""
    return len(list(output.glob("commits/*.json")))


def queued(job: str) -> bool:
    """Whether Slurm still has something of a job to run, or runs it."""
    asked = ["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job]
    states = subprocess.run(asked, text=True, capture_output=True, check=False).stdout.split()
    over = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"}
    return any(state not in over for state in states)


def show(log: Path) -> None:
    """A job's output without what Ray tells about itself."""
    print(f"\n# {log.name}")
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(line for line in lines if not TOLD_FROM_RAY.search(line)), flush=True)


@contextmanager
def slurm(root: Path) -> Iterator[None]:
    """Controller and nodes, stopped by their ids at the end."""
    for name in ("state", "spool-alpha", "spool-beta"):
        (root / name).mkdir(parents=True)
    conf = root / "slurm.conf"
    conf.write_text(CONF.format(root=root, host=socket.gethostname()))
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    os.environ["SLURM_CONF"] = str(conf)
    try:
        run("slurmctld -c && sleep 2 && slurmd -N alpha && slurmd -N beta && sleep 3")
        run("sinfo --version; sinfo -N -o '%N %T %c cores %m MB'")
        yield
    finally:
        subprocess.run(["scancel", "--state=running", "--state=pending"], check=False)
        time.sleep(2)
        for pid_file in sorted(root.glob("*.pid"), reverse=True):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)


def write_corpus(folder: Path) -> None:
    """Speech-like clips from code, the same each time."""
    folder.mkdir(parents=True)
    for seed in range(CLIPS):
        wave = speech(np.random.default_rng(seed), RATE_HZ, CLIP_S)
        wave *= RMS / np.sqrt(np.mean(wave**2))
        soundfile.write(folder / f"{seed:03d}.flac", np.clip(wave, -1, 1), RATE_HZ)


def job_file(root: Path, name: str) -> Path:
    """A job of its own output."""
    path = root / f"{name}.yaml"
    path.write_text(JOB.format(root=root, name=name))
    return path


def run_array(root: Path) -> Path:
    """Four tasks: one is cancelled, one requeued, and a job behind them writes the index."""
    job, output = job_file(root, "array"), root / "out" / "array"
    small = "--array=0-3 --cpus-per-task=1 --mem=2G"
    array = run(f"sbatch --parsable {small} -o {root}/task-%a.log {INFRA}/slurm-array.sh {job}")
    finish = f'--wrap "earmill extract {job} --finish"'
    last = run(
        f"sbatch --parsable --dependency=afterany:{array} --mem=2G -o {root}/finish.log {finish}"
    )
    wait_for("two shards are committed", lambda: commits(output) >= 2)
    run("squeue -o '%i %T %N %M'")
    run(f"scancel {array}_1")
    run(f"scontrol requeue {array}_2")
    run(f"sleep 3; squeue -o '%i %T %N %r'; ls {output}/commits | wc -l")
    # Slurm lets a requeued task wait for two minutes.
    run(f"sleep 10; scontrol update jobid={array}_2 starttime=now", fails=True)
    wait_for("no task and no finish is left", lambda: not queued(array) and not queued(last))
    run(f"squeue --states=all --jobs {array},{last} -o '%i %T'")
    for log in (*sorted(root.glob("task-*.log")), root / "finish.log"):
        show(log)
    return output


def run_cluster(root: Path) -> Path:
    """A Ray cluster over both nodes, requeued midway."""
    job, output = job_file(root, "cluster"), root / "out" / "cluster"
    small = "--nodes=2 --cpus-per-task=1 --mem=6G"
    cluster = run(f"sbatch --parsable {small} -o {root}/cluster.log {INFRA}/slurm.sh {job}")
    wait_for("two shards are committed", lambda: commits(output) >= 2)
    run(f"squeue -o '%i %T %N'; scontrol requeue {cluster}")
    wait_for("the job waits for its second start", lambda: "PENDING" in state_of(cluster))
    run(f"ls {output}/commits | wc -l; scontrol update jobid={cluster} starttime=now")
    wait_for("the job is over", lambda: not queued(cluster))
    run(f"squeue --states=all --jobs {cluster} -o '%i %T'")
    show(root / "cluster.log")
    return output


def state_of(job: str) -> str:
    """As squeue names it."""
    asked = ["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job]
    return subprocess.run(asked, text=True, capture_output=True, check=False).stdout


def compare(first: Path, second: Path) -> None:
    """The same rows with the same features, to the bit."""
    features = []
    for output in (first, second):
        rows = earmill.open_features(str(output))
        features.append({row.row_id: row.features["modulation"].tobytes() for row in rows})
    if len(features[0]) != CLIPS or features[0] != features[1]:
        raise SystemExit(f"{len(features[0])} and {len(features[1])} rows, which are not the same")
    print(f"\n# {CLIPS} rows of array and cluster have the same features, byte by byte")


PARTS = {"array": run_array, "cluster": run_cluster}


def main() -> None:
    """Everything, in a folder that is removed afterwards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave the folder, and say where it is")
    parser.add_argument("--only", choices=PARTS, help="one of the two; nothing is compared then")
    told = parser.parse_args()
    if missing := [name for name in ("slurmctld", "slurmd", "sbatch") if not shutil.which(name)]:
        raise SystemExit(
            f"missing: {', '.join(missing)}; apt-get install slurmctld slurmd slurm-client"
        )
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    root = Path(tempfile.mkdtemp(prefix="earmill-slurm-"))
    try:
        write_corpus(root / "corpus")
        with slurm(root):
            outputs = [part(root) for name, part in PARTS.items() if told.only in (None, name)]
        for output in outputs:
            run(f"earmill verify {output}")
        if len(outputs) == 2:
            compare(*outputs)
    finally:
        if told.keep:
            print(root)
        else:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
