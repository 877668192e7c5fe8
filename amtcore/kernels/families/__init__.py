"""One folder for each recurrence: a plain loop as its reference, and the same compiled for a CPU.

It may import `vector`; no family knows another (but for the filters that `one_pole` has of
`biquad`), or a chain.
"""
