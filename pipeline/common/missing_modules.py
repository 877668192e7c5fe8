"""One-line errors for modules that cannot be imported, with the command that installs them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import EarmillError, MissingPackageError
from earmill.pipeline.common.text import one_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OURS, MODELS = "earmill", "amtcore"
# The extra of jobs, whose models need torch; loaders name the smaller extra `torch`.
JOBS = "extract"
# Modules to distributions of another name.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@contextmanager
def needed_modules(where: str = "", extra: str = JOBS) -> Iterator[None]:
    """Turn failed imports in the block into `MissingPackageError`.

    Args:
        where: Name of the code in the block.
        extra: Extra of earmill to install if the models' packages are missing, such as torch.
    """
    try:
        yield
    except EarmillError:
        raise
    except ImportError as error:
        raise missing_package(error, where, extra) from None


def missing_package(error: ImportError, where: str = "", extra: str = JOBS) -> MissingPackageError:
    name = _module(error).partition(".")[0]
    what = f"the module {name}" if name else "a module"
    why = f"cannot be imported here ({one_line(error)})"
    if name and isinstance(error, ModuleNotFoundError):
        why = "is not installed here"
    place = f"{where}: " if where else ""
    return MissingPackageError(f"{place}{what} {why}: {install_line(error, extra)}")


def install_line(error: ImportError, extra: str = JOBS) -> str:
    name = _module(error)
    if not name:
        return f"run pip install --force-reinstall {OURS}"
    again = "" if isinstance(error, ModuleNotFoundError) else "--force-reinstall "
    return f"run pip install {again}{_wanted(name, extra)}"


def _module(error: ImportError) -> str:
    """Return the name of the missing module; empty if it is unknown, or a module of earmill."""
    name = error.name or ""
    return "" if name.partition(".")[0] in (OURS, MODELS) else name


def _wanted(module: str, extra: str) -> str:
    """Return the argument of `pip install`: with the versions that earmill needs, or its extra."""
    from packaging.utils import canonicalize_name

    package = module.partition(".")[0]
    wanted = canonicalize_name(DISTRIBUTIONS.get(package, package))
    named = [r for r in _requirements(OURS) if canonicalize_name(r.name) == wanted]
    for requirement in named:
        if _EXTRA.search(str(requirement.marker)) is None:
            return shlex.quote(f"{requirement.name}{requirement.specifier}")
    if any(canonicalize_name(requirement.name) == wanted for requirement in _requirements(MODELS)):
        return shlex.quote(f"{OURS}[{extra}]")
    extras = [match[1] for r in named if (match := _EXTRA.search(str(r.marker)))]
    # Extras for tests and benchmarks hold more than is needed.
    users = [each for each in extras if each not in ("test", "bench", "docs")]
    return shlex.quote(f"{OURS}[{users[0]}]") if users else shlex.quote(wanted)


def _requirements(distribution: str) -> list[Requirement]:
    from packaging.requirements import Requirement

    try:
        return [Requirement(line) for line in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return []
