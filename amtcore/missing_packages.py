"""One-line errors for packages of the extra `models`, which a reader of features does without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_packages(what: str) -> Iterator[None]:
    """Name the command that installs what a failed import in the block needs.

    Args:
        what: Name of the code in the block, such as `amtcore.Dau1997`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "amtcore":
            raise
        raise ModuleNotFoundError(
            f"{what} needs the module {error.name}, which is not installed here: run "
            "pip install 'amtcore[models]'",
            name=error.name,
        ) from error
