"""Checks of the files of infra/, each with its own tool: `make infra`, `slurm_run`."""
