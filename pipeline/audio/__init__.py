"""From bytes to samples at a model's rate: containers, decoders, channels, time spans, resampling.

It may import `common`.
"""
