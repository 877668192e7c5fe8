"""One-line errors for modules that cannot be imported, with the command that installs them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from earmill.pipeline.common.errors import EarmillError, MissingPackageError
from earmill.pipeline.common.text import one_line

OURS = "earmill"
# Modules to distributions of another name.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@contextmanager
def needed_modules(where: str = "") -> Iterator[None]:
    """Turn failed imports in the block into `MissingPackageError`; `where` names the code."""
    try:
        yield
    except EarmillError:
        raise
    except ImportError as error:
        raise missing_package(error, where) from error


def missing_package(error: ImportError, where: str = "") -> MissingPackageError:
    name = _module(error).partition(".")[0]
    what = f"the module {name}" if name else "a module"
    why = f"cannot be imported here ({one_line(error)})"
    if name and isinstance(error, ModuleNotFoundError):
        why = "is not installed here"
    place = f"{where}: " if where else ""
    return MissingPackageError(f"{place}{what} {why}: {install_line(error)}")


def install_line(error: ImportError) -> str:
    name = _module(error)
    if not name:
        return f"run pip install --force-reinstall {OURS}"
    again = "" if isinstance(error, ModuleNotFoundError) else "--force-reinstall "
    return f"run pip install {again}{_wanted(name)}"


def _module(error: ImportError) -> str:
    """Return the name of the missing module; empty if it is unknown, or a module of earmill."""
    name = error.name or ""
    return "" if name.partition(".")[0] in (OURS, "amtcore") else name


def _wanted(module: str) -> str:
    """Return the argument of `pip install`: with the versions that earmill needs, or its extra."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    package = module.partition(".")[0]
    wanted = canonicalize_name(DISTRIBUTIONS.get(package, package))
    extras = []
    try:
        requirements = metadata.requires(OURS) or []
    except metadata.PackageNotFoundError:
        requirements = []
    for requirement in map(Requirement, requirements):
        if canonicalize_name(requirement.name) == wanted:
            extra = _EXTRA.search(str(requirement.marker))
            if extra is None:
                return shlex.quote(f"{requirement.name}{requirement.specifier}")
            extras.append(extra[1])
    # Extras for tests and benchmarks hold more than is needed.
    users = [extra for extra in extras if extra not in ("test", "bench", "docs")]
    return shlex.quote(f"{OURS}[{users[0]}]") if users else shlex.quote(wanted)
