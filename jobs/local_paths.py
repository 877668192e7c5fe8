"""Where commands write on this machine, whatever is written there."""

from __future__ import annotations

import re
from pathlib import Path

from earmill.pipeline.common.errors import OutputError

# What `Path` leaves of the beginning of a uri; one letter is a drive.
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(path: Path) -> None:
    """Refuse what is no path of this machine.

    Raises:
        OutputError: It is a uri, of which a folder `s3:` would be made here.
    """
    if URI.match(str(path)):
        raise OutputError(f"expected a path of this machine, got {path}, which reads as a uri")
