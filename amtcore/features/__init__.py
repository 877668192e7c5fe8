"""From a model to named feature streams of whole clips or of a long signal, chunk by chunk.

It may import `models` and what is below them.
"""
