"""Several recurrences run block by block over cached data, ending in full rate or pooled frames.

It may import `families` and `vector`.
"""
