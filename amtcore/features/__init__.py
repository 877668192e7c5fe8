"""From a model to named feature streams of whole clips or of a long signal, chunk by chunk.

It may import `models` and what is below them. A model of one's own is written against the names
below.
"""

from amtcore.features.base import Extractor, ExtractStream, StreamInfo, StreamKind
from amtcore.features.feature_model import FeatureModel
from amtcore.features.frame_model import FrameDesign, FrameGrid, FrameModel
from amtcore.features.parameters import Parameter, parameters_of

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
