"""Processes in which packages cannot be imported, as if they were not installed.

    environment = without(tmp_path, "torch", "numba")
    subprocess.run([sys.executable, ...], env=environment)

Python imports the module `sitecustomize` of a folder in PYTHONPATH when it starts, so processes
that these processes start lack the packages too.
"""

from __future__ import annotations

import os
from pathlib import Path

# Packages of each extra that the base does not have.
MODELS = ("torch", "torchaudio", "scipy", "numba", "llvmlite")
EXTRACT = (*MODELS, "av", "miniaudio", "braceexpand", "prometheus_client")
STORES = ("s3fs", "gcsfs", "adlfs", "obstore")
HF = ("datasets", "huggingface_hub")
ALL = (*EXTRACT, *STORES, *HF, "ray", "ipywidgets", "nir", "pytest")


def without(folder: Path, *packages: str) -> dict[str, str]:
    """Return an environment for processes that lack the packages; writes a file into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Garbage is seldom looked for: in a process that mostly imports it would take a tenth.
    lines = ["import gc, sys", "gc.set_threshold(100_000)"]
    lines += [f"sys.modules[{package!r}] = None" for package in packages]
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return os.environ | {"PYTHONPATH": str(folder)}
