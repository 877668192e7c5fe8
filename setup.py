"""Refuses to build from a checkout without symbolic links; pyproject.toml says everything else.

The packages are links in src/. Git writes small text files in their place where core.symlinks is
false, and setuptools would then build a package that lacks most of its modules.
"""

from pathlib import Path

from setuptools import setup

LINKS = ("src/earmill/jobs", "src/earmill/pipeline")

for link in LINKS:
    if not (Path(__file__).parent / link).is_dir():
        raise SystemExit(
            f"expected a symbolic link to a folder at {link}, got a checkout without links; run: "
            "git config core.symlinks true && git checkout HEAD -- src core/src (on Windows, "
            "switch on Developer Mode first)"
        )
setup()
