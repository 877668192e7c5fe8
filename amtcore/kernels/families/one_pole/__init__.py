"""Cascades of one complex one-pole section: gammatone and modulation filters.

It may import `vector`, `over_time` and `biquad`, no other family.
"""
