"""From rows to batches: order of an epoch, shares of ranks, crops, collates, resuming."""
