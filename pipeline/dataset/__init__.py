"""The dataset in an output: description, commits, snapshots, cards, checks and repairs.

This room may import `formats`, `planning` and the rooms below them. It never imports a driver, a
worker or a reader.
"""
