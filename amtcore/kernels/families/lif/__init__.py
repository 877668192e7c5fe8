"""Leaky integrate-and-fire neurons with exponential synapses.

It may import `vector` and `over_time`, no other family.
"""
