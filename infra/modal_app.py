"""A job on Modal, as drivers that share its shards: modal run infra/modal_app.py --job JOB

Fill in REGISTRY. JOB is the job file's address in a bucket. `modal secret create earmill-bucket
AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_REGION=...` gives the drivers their credentials.
"""

import subprocess

import modal

DRIVERS = 8
CORES = 8

app = modal.App("earmill")
secret = modal.Secret.from_name("earmill-bucket")
image = (
    # For Amazon's registry: modal.Image.from_aws_ecr("REGISTRY/earmill:0.2.0", secret=secret)
    modal.Image.from_registry("REGISTRY/earmill:0.2.0")
    .entrypoint([])
    # The image's cache of kernels belongs to the image's user. Modal may run another user.
    .env({"NUMBA_CACHE_DIR": "/tmp/earmill-kernels"})
)


@app.function(
    image=image,
    secrets=[secret],
    cpu=CORES,
    memory=16 * 1024,
    timeout=24 * 3600,
    retries=5,
)
def drive(job: str, number: int) -> None:
    """Share the shards of a job until all of them are committed."""
    command = ["earmill", "extract", job, "--join", "--set", f"run.array={number}/{DRIVERS}"]
    subprocess.run([*command, "--set", f"run.workers={CORES}"], check=True)


@app.local_entrypoint()
def main(job: str) -> None:
    for _ in drive.starmap((job, number) for number in range(DRIVERS)):
        pass
