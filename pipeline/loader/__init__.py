"""From rows to batches: order of an epoch, shares of ranks and workers, crops, collating, resuming.

It takes rows of anything that offers `FeatureRows` and knows no file. It may import `formats` and
`common`.
"""
