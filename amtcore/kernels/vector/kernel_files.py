"""Compiled kernels on disk: one file for a kernel and the types it is called with.

    <folder>/<kernel>-<hash of the key>.kernel    written whole, with a checksum (`whole_files`)

The key is all that the machine code depends on: kernel, types, sources of all kernels, processor
and its features, versions of Python, numba and llvmlite. A file of other sources or another
processor has another name and is never opened; one that is damaged counts as not there.

Folders, in this order; the code in them is run, so one that others can write to is refused:

    amtcore_kernels in NUMBA_CACHE_DIR, else __pycache__ beside the sources, else the user's cache
    amtcore_kernels in AMTCORE_KERNELS, which was filled on another machine; only read
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba

from amtcore.kernels.vector import whole_files
from amtcore.kernels.vector.kernel_cache import folder_for, made_private
from amtcore.kernels.vector.source_digest import sources_digest

#: Names a folder of kernels that were compiled before.
PREBUILT = "AMTCORE_KERNELS"
FOLDER = "amtcore_kernels"
_MARK = "amtcore kernel"


class KernelFiles:
    """The compiled code of one kernel, in place of numba's own cache.

    Args:
        function: The kernel as it is written.
        key: What its code depends on beside sources and types; None is the constants around it.
    """

    def __init__(self, function: Callable[..., Any], key: str | None = None) -> None:
        self._function, self._key = function, key
        self._name = function.__qualname__.replace("<locals>.", "")

    @property
    def cache_path(self) -> str:
        """Where it writes."""
        return str(own_folder())

    def read(self, signature: str, machine: tuple[str, ...]) -> bytes | None:
        """Return the code from the first folder that has it, or None.

        Args:
            signature: The types of the arguments.
            machine: numba's description of the processor; its second item is the name.
        """
        name = self._file_name(signature, machine)
        prebuilt = prebuilt_folder()
        for folder in filter(None, (own_folder(), prebuilt)):
            code = whole_files.read(folder / name, _MARK)
            if code is not None:
                return code
        if prebuilt is not None:
            _say_none(prebuilt, machine[1])
        return None

    def write(self, signature: str, machine: tuple[str, ...], code: bytes) -> None:
        """Keep the code; where nothing can be written the next process compiles again."""
        path = own_folder() / self._file_name(signature, machine)
        with contextlib.suppress(OSError):
            whole_files.write(path, _MARK, code)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from compiling this kernel meanwhile: they find it afterwards."""
        try:
            handle = os.open(own_folder() / f"{self._name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _file_name(self, signature: str, machine: tuple[str, ...]) -> str:
        code = self._function.__code__
        constants = self._key
        if constants is None:
            constants = repr([cell.cell_contents for cell in self._function.__closure__ or ()])
        key = (
            self._function.__module__,
            self._name,
            signature,
            constants,
            hashlib.sha256(code.co_code).hexdigest(),
            sources_digest(Path(code.co_filename).parent),
            machine,
            platform.python_version_tuple()[:2],
            numba.__version__,
            llvmlite.__version__,
        )
        return f"{self._name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:40]}.kernel"


def own_folder() -> Path:
    """Where this process keeps kernels."""
    return made_private(folder_for(FOLDER, Path(__file__).parents[1]))


def prebuilt_folder() -> Path | None:
    """The folder of kernels that were compiled before, if one is named.

    Raises:
        KernelCacheError: Others can write to it.
    """
    named = os.environ.get(PREBUILT)
    if not named:
        return None
    folder = Path(named).absolute() / FOLDER
    if not folder.is_dir():
        _say(f"{PREBUILT}={named} holds no kernels: they are compiled here")
        return None
    return made_private(folder)


def _say_none(folder: Path, processor: str) -> None:
    _say(
        f"{folder.parent} lacks kernels for this processor ({processor}) and these sources and "
        f"versions, or they are damaged: they are compiled here; fill it again on such a machine"
    )


@functools.cache
def _say(line: str) -> None:
    """Once a process."""
    logging.getLogger("amtcore").warning(line)
