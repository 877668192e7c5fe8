"""`earmill spec`: every key of a job file with its type, default and meaning."""

from __future__ import annotations


def spec() -> None:
    """Print the reference of the job file, as Markdown."""
    from earmill.pipeline.spec.reference import reference

    print(reference(), end="")
