"""The plan of an output that has one."""

from __future__ import annotations

from pathlib import PurePosixPath

from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.storage.layout import Layout


def only_plan(layout: Layout) -> Plan:
    """Read the plan of an output; ValueError if there is not exactly one."""
    (path,) = (path for path in map(PurePosixPath, layout.list("plan")) if len(path.parts) == 2)
    return Plan.read(layout, path.stem)
