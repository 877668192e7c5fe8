"""From rows to batches: order of an epoch, shares of ranks and workers, crops, collates, resuming.

The input is any `FeatureRows`; no file is known here. It may import `formats` and `common`.
"""
