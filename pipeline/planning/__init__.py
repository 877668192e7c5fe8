"""Which rows there are, cut into shards once and for all, and what computing them will cost.

It may import `sources`, `formats` and what is below them.
"""
