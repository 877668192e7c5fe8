"""One folder for each recurrence: a plain loop as its reference, and the same compiled for a CPU.

It may import `vector`; no family knows another, or a chain.
"""
