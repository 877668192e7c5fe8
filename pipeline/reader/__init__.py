"""A stored dataset as rows: by number, by id, and as slices in seconds.

It may import `loader`, `dataset`, `formats`, `storage` and `common`. Neither models nor torch are
imported before they are needed.
"""
