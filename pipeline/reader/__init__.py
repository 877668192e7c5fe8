"""Finished features as rows, slices, batches and torch datasets.

It may import `dataset`, `formats`, `storage` and `common`; neither models nor torch are loaded
before they are asked for.
"""
