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
import pickle
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import compiler
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from amtcore.kernels.vector import whole_files
from amtcore.kernels.vector.kernel_cache import folder_for, made_private
from amtcore.kernels.vector.source_digest import sources_digest

#: Names a folder of kernels that were compiled before.
PREBUILT = "AMTCORE_KERNELS"
FOLDER = "amtcore_kernels"
_MARK = "amtcore kernel"


class KernelFiles:
    """The cache of one kernel, in the place of numba's own.

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

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel for these types, from the first folder that has it; None where none does."""
        # All that loaded code calls. What compiling needs, half a second more, it fetches itself.
        rtsys.initialize(target_context)
        name = self._file_name(sig, target_context.codegen())
        prebuilt = prebuilt_folder()
        for folder in filter(None, (own_folder(), prebuilt)):
            code = whole_files.read(folder / name, _MARK)
            if code is not None:
                return compiler.CompileResult._rebuild(target_context, *pickle.loads(code))
        if prebuilt is not None:
            _say_none(prebuilt, target_context.codegen().magic_tuple()[1])
        return None

    def save_overload(self, sig: Any, made: Any) -> None:
        """Keep the kernel; where nothing can be written the next process compiles again."""
        if made.library.has_dynamic_globals:
            return  # addresses of this process
        path = own_folder() / self._file_name(sig, made.codegen)
        with contextlib.suppress(OSError):
            whole_files.write(path, _MARK, dumps(made._reduce()))

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

    def _file_name(self, sig: Any, codegen: Any) -> str:
        code = self._function.__code__
        constants = self._key
        if constants is None:
            constants = repr([cell.cell_contents for cell in self._function.__closure__ or ()])
        key = (
            self._function.__module__,
            self._name,
            str(sig),
            constants,
            hashlib.sha256(code.co_code).hexdigest(),
            sources_digest(Path(code.co_filename).parent),
            codegen.magic_tuple(),
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
