"""What lies in an output as a whole: description, commits, snapshots, cards, checks and repairs.

It may import `formats`, `planning` and what is below them, never a driver, worker or reader.
"""
