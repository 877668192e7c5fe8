"""earmill: audio corpora into auditory-model features.

    import earmill

    earmill.extract("job.yaml")                       # the job, as `earmill extract job.yaml`
    ds = earmill.open_features("features")            # rows by number, by id, by seconds
    loader = DataLoader(ds.torch(), batch_size=32, collate_fn=earmill.collate)
    earmill.models.Dau1997(fs=16000)                  # a model as a PyTorch module

Every name is loaded when it is first used: importing the package takes a few milliseconds and
imports neither torch nor Ray. The package may import `api`, `pipeline`, `jobs` and `amtcore`; none
of them imports the package.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

# Public names, the modules they are from, and their names there. The stub is read, so that each
# name stands in one place.
_HOMES: dict[str, tuple[str, str]] = {
    public: (module, name)
    for module, name, public in re.findall(
        r"^from (\S+) import (\w+) as (\w+)$",
        Path(__file__).with_suffix(".pyi").read_text("utf-8"),
        re.MULTILINE,
    )
}
__all__ = sorted({*_HOMES, "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("earmill")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from earmill.pipeline.common.missing_modules import needed_modules

    home, attribute = _HOMES[name]
    extra = "torch" if home.startswith("earmill.pipeline.loader.") else "extract"
    with needed_modules(f"earmill.{name}", extra):
        module = import_module(home)
        if attribute not in vars(module):  # a module of a package
            import_module(f"{home}.{attribute}")
    value = globals()[name] = getattr(module, attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
