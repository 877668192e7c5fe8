"""Refuses to build from a checkout without symbolic links, as the setup.py of earmill does."""

from pathlib import Path

from setuptools import setup

if not (Path(__file__).parent / "src" / "amtcore").is_dir():
    raise SystemExit(
        "expected a symbolic link to a folder at core/src/amtcore, got a checkout without links; "
        "run: git config core.symlinks true && git checkout HEAD -- src core/src (on Windows, "
        "switch on Developer Mode first)"
    )
setup()
