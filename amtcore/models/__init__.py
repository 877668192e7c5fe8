"""Complete models, and the registry that the command line and the pipeline look in."""

from .dau1997 import Dau1997

__all__ = ["Dau1997"]
