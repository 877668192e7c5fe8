"""Hilbert envelope of whole signals. No recurrence, but it has the same two implementations."""
