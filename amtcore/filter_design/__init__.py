"""Filters from their specification, in float64 numpy: coefficients and taps.

It may import nothing but `amtcore.errors`.
"""
