"""The `run` section of a job: where and how it runs, which changes no output."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from earmill.pipeline.spec.section import PositiveFloat, SpecModel

# One worker fills a GPU: it keeps two launches in flight.
GPUS_PER_WORKER = 1.0
# Kubernetes and spot machines give 30 s between SIGTERM and SIGKILL.
GRACE_S = 25.0
SLURM_ARRAY = "slurm-array"
# HOST:PORT, or a text file.
METRICS = r"^([^/:\s]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}$|.\.prom$"


class RunSpec(SpecModel):
    """How the job runs; nothing here changes the output.

    Args:
        executor: What carries the workers: ray, actors on this machine or on a cluster; local,
            plain processes of this machine, which start faster; slurm-array, the same in each task
            of an array of batch jobs, which share the shards out and leave when none is left.
        array: Which task of an array this is, and of how many: 3/100. Taken from the batch system's
            environment when null; it only says where to begin.
        grace_s: Seconds that shards in flight may go on after a request to stop (SIGTERM, SIGINT,
            or SIGUSR1 before a time limit).
        workers: Worker processes; chosen from the machines when null.
        threads_per_worker: Compute threads of a worker; chosen when null. What decodes, checks and
            writes has threads beside them and takes what is idle of the cores that the process may
            use: those that taskset, a batch system or a container leaves it, and no others.
        device: Where the models run: auto takes the GPUs that the nodes offer and works on the CPUs
            of the others, cuda needs a GPU, cpu takes none.
        gpus_per_worker: Share of a GPU for each worker on one, above 0 and up to 1, such as 0.5 for
            two workers on a GPU; 1 when null, 0 is the same as device cpu.
        max_bad_fraction: Quarantined rows above this fraction fail the job (exit code 3).
        max_attempts: Tries of a shard before its rows are searched for the culprit.
        shard_deadline_s: Seconds a shard may take before it is tried a second time; learned from
            the shards before it when null.
        row_deadline_s: Seconds a row may take alone. A shard has as much for each of its rows, if
            that is less than what it would have without; then its rows are searched, and one that
            takes longer alone, twice, is quarantined.
        decode_in_child: Decode in child processes without credentials, with bounds on memory and
            time: bytes that crash or hang a decoder are a row in quarantine (decoder_crash,
            decoder_limit), and reach nothing of the worker.
        metrics: Where the driver shows its metrics to Prometheus: HOST:PORT to listen at, port 0
            for any; or the path of a text file for node_exporter that ends in .prom, in which {pid}
            and {host} are put in. Nowhere when null.
        log_format: What the command prints of a run: text, for people, or json, one structured line
            an event.
    """

    executor: Literal["ray", "local", "slurm-array"] = "ray"
    array: str | None = Field(default=None, pattern=r"^[0-9]+/[1-9][0-9]*$")
    grace_s: float = Field(default=GRACE_S, ge=0, allow_inf_nan=False)
    workers: int | None = Field(default=None, ge=1)
    threads_per_worker: int | None = Field(default=None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_worker: float | None = Field(default=None, ge=0, le=1)
    max_bad_fraction: float = Field(default=0.05, ge=0, le=1)
    max_attempts: int = Field(default=3, ge=1)
    shard_deadline_s: PositiveFloat | None = None
    row_deadline_s: PositiveFloat | None = None
    decode_in_child: bool = False
    metrics: str | None = Field(default=None, pattern=METRICS)
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="after")
    def _gpus_for_the_device(self) -> RunSpec:
        if self.device == "cpu" and self.gpus_per_worker:
            raise ValueError(
                f"expected no gpus_per_worker with device cpu, got {self.gpus_per_worker:g}; leave "
                "it out, or set device to auto or cuda"
            )
        if self.device == "cuda" and self.gpus_per_worker == 0:
            raise ValueError(
                "expected gpus_per_worker above 0 with device cuda, got 0; leave it out for one "
                "GPU each, or set device to cpu"
            )
        return self

    @property
    def gpus_wanted(self) -> float:
        """Share of a GPU for a worker that computes on one; 0 where none may."""
        if self.device == "cpu":
            return 0.0
        return GPUS_PER_WORKER if self.gpus_per_worker is None else self.gpus_per_worker
