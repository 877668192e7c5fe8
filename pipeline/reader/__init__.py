"""A stored dataset as rows: by number, by id, and as slices in seconds.

It may import `loader`, `dataset`, `formats`, `storage` and `common`; neither models nor torch are
loaded before they are asked for.
"""
