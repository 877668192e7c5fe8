"""Which rows there are, cut into shards once and for all, and what computing them will cost.

This room may import `sources`, `formats` and the rooms below them.
"""
