"""From a model to named feature streams of whole clips or of a long signal, chunk by chunk.

It may import `models` and lower layers. A model of one's own is written against the names
below, which are loaded when they are first used: what a stream is needs no model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from amtcore.missing_packages import needed_packages

if TYPE_CHECKING:
    from amtcore.features.feature_model import Extractor, ExtractStream, FeatureModel
    from amtcore.features.frame_model import FrameDesign, FrameGrid, FrameModel
    from amtcore.features.parameters import Parameter, parameters_of
    from amtcore.features.stream_info import StreamInfo, StreamKind

_HOMES = {
    **dict.fromkeys(("ExtractStream", "Extractor", "FeatureModel"), "feature_model"),
    **dict.fromkeys(("FrameDesign", "FrameGrid", "FrameModel"), "frame_model"),
    **dict.fromkeys(("Parameter", "parameters_of"), "parameters"),
    **dict.fromkeys(("StreamInfo", "StreamKind"), "stream_info"),
}

__all__ = [
    "ExtractStream",
    "Extractor",
    "FeatureModel",
    "FrameDesign",
    "FrameGrid",
    "FrameModel",
    "Parameter",
    "StreamInfo",
    "StreamKind",
    "parameters_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_packages(f"amtcore.features.{name}"):
        found = getattr(import_module(f"amtcore.features.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
