"""What a job needs beside the models: Ray, and a place that commits are safe in."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from earmill.jobs.doctor.check import Check, checked
from earmill.pipeline.common.errors import OutputError, RunStopped
from earmill.pipeline.common.redact import redact

#: A worker process of Ray imports Python and Ray, no models.
RAY_TASK_WITHIN_S = 60.0


def ray_check() -> Check:
    """A private Ray starts here and runs a task; one that this process has is used as it is."""
    return checked("Ray", _run_task)


def _run_task() -> str:
    from earmill.pipeline.driver.executors.ray_session import is_joined, live_nodes, ray_session

    # "local": whatever cluster RAY_ADDRESS names is no matter of this machine.
    with ray_session(None if _has_ray() else "local"):
        import ray
        from ray.exceptions import GetTimeoutError

        answer = ray.remote(_worker_version).options(num_cpus=1).remote()
        try:
            found = ray.get(answer, timeout=RAY_TASK_WITHIN_S)
        except GetTimeoutError as error:
            raise RunStopped(
                f"Ray starts, but ran no task within {RAY_TASK_WITHIN_S:.0f} s; look whether other "
                "programs take this machine's cores or memory"
            ) from error
        cpus = sum(node.cpus for node in live_nodes())
        how = "joined" if is_joined() else "private, on loopback"
        return f"runs a task ({how}, {cpus} CPUs, earmill {found} in its worker)"


def _has_ray() -> bool:
    import sys

    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _worker_version() -> str:
    from importlib.metadata import version

    return version("earmill")


def storage_check(uri: str, options: Mapping[str, Any]) -> Check:
    """Create, read back, create again, list and delete a small file below a uri."""
    return checked(f"storage {redact(uri)}", lambda: _use_storage(uri, options), names_a_place=True)


def _use_storage(uri: str, options: Mapping[str, Any]) -> str:
    from earmill.pipeline.storage.layout import Layout
    from earmill.pipeline.storage.store_errors import store_errors

    with store_errors(redact(uri)):
        layout = Layout.open(uri, options)
        layout.check_writable()
        folder = f"earmill-doctor-{secrets.token_hex(4)}"
        file, content = f"{folder}/probe", secrets.token_bytes(1024)
        try:
            layout.create_own(file, content)
            _expect("read back", layout.read_bytes(file) == content)
            _expect("refuse to overwrite", not layout.put_if_absent(file, b"second"))
            _expect("list", layout.list(folder) == [file])
        finally:
            layout.delete(folder)
        _expect("delete", layout.list(folder) == [])
    return "created, read back, not overwritten, listed, deleted"


def _expect(step: str, good: bool) -> None:
    if not good:
        raise OutputError(
            f"this store does not {step} a file that was just written; use a local folder, s3:// "
            "or gs://"
        )
