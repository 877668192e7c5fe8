"""The files of infra/, each by the tool that it is for: `make infra`, `make infra-slurm`."""
