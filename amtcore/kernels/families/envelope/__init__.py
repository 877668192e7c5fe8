"""Hilbert envelope of whole signals. No recurrence, but it has the same two implementations.

It may import `vector` and `over_time`, no other family.
"""
